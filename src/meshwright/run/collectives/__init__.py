"""Collectives: counted here, as what really goes through the process groups."""
