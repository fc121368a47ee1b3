"""Lets a CPU rank keep the memory that it has freed, as torch's allocator does on a GPU.

glibc maps each allocation of 32 MiB or more on its own, and unmaps it when it is freed; it also returns the
free end of its heap. So a step that allocates large gradients or logits gets new pages each time, and the
kernel clears every one. A training loop allocates the same sizes again in the next step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
LARGEST_KEPT_BYTES = 1 << 30
"""Larger allocations are mapped on their own."""
NEVER = (1 << 31) - 1
"""Largest value of a parameter: the heap is not trimmed below 2 GiB of free memory at its end."""
TUNED_BY = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables with which a user tunes malloc."""


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Keep freed memory in this process, unless the user has tuned malloc; returns whether glibc does."""
    if any(name in environ for name in TUNED_BY):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES) and mallopt(M_TRIM_THRESHOLD, NEVER)
    return bool(kept)
