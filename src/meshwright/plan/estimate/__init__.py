"""Memory and time of any layout, for thousands of layouts at once: closed formulas on numpy arrays."""
