"""Faults to inject into a running run, and the invariants that a run keeps under them."""
