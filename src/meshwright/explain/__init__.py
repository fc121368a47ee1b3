"""Reads what a run promised and what it did, and says where they differ. No torch."""
