"""Pipelines: a schedule's actions, run as they are written."""
