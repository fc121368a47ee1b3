"""Errors, units, events: what every other layer reports_loss. Standard library only."""
