"""Meshwright plans, runs, survives and explains distributed training."""

__version__ = "0.1.0"
