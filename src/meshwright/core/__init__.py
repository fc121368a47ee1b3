"""Errors, units, events: what every other layer speaks. Standard library only."""
