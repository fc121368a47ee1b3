"""Checkpoints: safetensors files and a JSON manifest with checksums; no pickle.

This package is below ``models`` and ``parallel``, because models load Hugging Face weights through it. It
sees the objects of a training run through the protocols in ``state``.
"""
