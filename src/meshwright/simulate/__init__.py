"""Simulates what cannot be tried: a step without devices, months of training with failures. Never imports torch."""
