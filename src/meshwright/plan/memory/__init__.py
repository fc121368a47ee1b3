"""Predicts the live tensors of a rank at every point of a step, its peak, and whether it fits."""
