"""Checkpoints: safetensors and a JSON manifest with checksums; no pickle."""
