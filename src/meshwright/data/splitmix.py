"""SplitMix64: 64 pseudorandom bits from each number of an array (Steele, Lea and Flood, 2014).

The sample order, synthetic images, near-duplicates and word hashes use it. NumPy may change the streams of
its generators between versions; this function never changes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of its sequence: 2^64 divided by the golden ratio."""


def mix(x: Uint64s) -> Uint64s:
    """SplitMix64's finalizer; arrays only, because NumPy warns when a scalar overflows."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
