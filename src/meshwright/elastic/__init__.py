"""Supervision of a run: what to do when a rank fails. Nothing here imports torch."""
