"""Compares what the plan predicted with what the run measured. No torch."""
