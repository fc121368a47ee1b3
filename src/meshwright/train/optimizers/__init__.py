"""Optimizers that torch lacks, or whose torch version does not give equal losses in all layouts."""
