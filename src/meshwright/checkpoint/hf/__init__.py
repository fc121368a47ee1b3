"""Imports and exports Hugging Face folders: config, tensor names and weights."""
