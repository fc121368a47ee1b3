"""Fault tests of the installed system: real runs, real signals, and the pass criteria."""
