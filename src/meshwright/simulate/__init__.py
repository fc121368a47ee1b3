"""Simulates a step without devices, and months of training with failures. Never imports torch."""
