"""Predicts the bytes and calls of every collective, one module per parallelism."""
