"""Executes a plan: mesh, models, parallelisms, loop. The layer that imports torch."""
