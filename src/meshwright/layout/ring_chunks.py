"""How ring attention splits the key and value heads into chunks that are sent one after the other."""

from __future__ import annotations

HEAD_CHUNKS = 8
"""Chunks of the key heads. With more chunks, less communication is exposed (1 / (2 x chunks) of it with two
ranks and equal compute and send times), but kernels and messages get smaller.
"""


def list_head_chunks(key_heads: int) -> list[tuple[int, int]]:
    """The first key head of each chunk, and the end (exclusive)."""
    width = -(-key_heads // HEAD_CHUNKS)
    return [(first, min(first + width, key_heads)) for first in range(0, key_heads, width)]
