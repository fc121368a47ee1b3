"""Errors, units, events: what every other layer uses. Standard library only."""
