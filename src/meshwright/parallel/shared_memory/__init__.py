"""Collectives of ranks on one host through memory that their agent created."""
