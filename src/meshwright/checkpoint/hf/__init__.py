"""Hugging Face folders, in and out: names, weights that are there, and the way a checkpoint becomes one."""
