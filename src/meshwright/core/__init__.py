"""Errors, units, events and files, for all layers. Standard library only."""
