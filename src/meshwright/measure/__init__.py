"""Counts collectives, tracks live tensor memory and times GPU work."""
