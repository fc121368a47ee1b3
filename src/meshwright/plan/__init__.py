"""Predicts bytes, memory and time of a layout, and chooses one. Never imports torch."""
