"""Parallelisms: each axis is applied to a model by one function; ``apply`` has their order."""
