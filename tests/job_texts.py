"""Job files that several tests share."""

from __future__ import annotations

TINY_ON_H100 = """
[model]
preset = "tiny"
[cluster]
preset = "h100-sxm"
[data]
path = "text"
seq_len = 32
[train]
steps = 4
global_batch = 8
"""
