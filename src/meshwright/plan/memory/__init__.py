"""Predicts the live tensors of a rank through a training step, and whether they fit on its device."""
