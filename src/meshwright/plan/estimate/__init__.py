"""Estimates the memory of thousands of layouts at once: closed formulas on numpy columns."""
