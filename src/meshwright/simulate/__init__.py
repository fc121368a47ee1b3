"""Simulates what cannot be tried: months of training with failures. Never imports torch."""
