"""Optimizers that torch lacks, or has in a form that breaks the contracts."""
