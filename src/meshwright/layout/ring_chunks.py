"""How ring attention splits the key-value heads into lanes that are sent one after the other."""

from __future__ import annotations

HEAD_CHUNKS = 8
"""Parts of the key heads that go round a ring one after the other. With more, less is left that nothing
hides, one part in 2 x lanes where two ranks compute as long as they send; but kernels and messages get small.
"""


def list_head_chunks(key_heads: int) -> list[tuple[int, int]]:
    """The first key head of each lane, and the one behind its last."""
    width = -(-key_heads // HEAD_CHUNKS)
    return [(first, min(first + width, key_heads)) for first in range(0, key_heads, width)]
