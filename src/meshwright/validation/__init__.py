"""Predictions compared with published runs of other frameworks. No torch."""
