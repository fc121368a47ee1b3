"""The sample order: a pure function of (seed, epoch, global sample index).

Training resumes with the same order after any failure and on any number of ranks, because the order has no
state. Three design decisions:

*   **Windows.** Samples are shuffled within windows of fixed size, and windows are read in order. Reads stay
    within a part of one memory-mapped file, and the order of old data does not depend on later data. (There
    is no shuffle over the whole corpus; mix files that differ much when you prepare them.)
*   **Shards.** A window never spans shards, and the last, partial window of a shard is shuffled by
    itself. So appended shards come last and reorder nothing. Appending changes only the length of the epoch,
    and with it the start of later epochs.
*   **Own bijection.** A Feistel network is a bijection for any round function; this one mixes like SplitMix64
    (Steele, Lea and Flood, 2014). NumPy may change the streams of its generators between versions, and a run
    must be able to resume after an upgrade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.splitmix import GOLDEN, Uint64s, mix

WINDOW = 65536
"""Samples per shuffle window."""

_MAX_WINDOW = 2**48
_ROUNDS = 8
_MASK_64 = 2**64 - 1

Int64s = npt.NDArray[np.int64]


class Order(Protocol):
    """The sample at each position of a run."""

    def samples_at(self, positions: npt.ArrayLike) -> Int64s:
        """The samples at many positions, in the numbering of the dataset."""


class SampleOrder:
    """The sample at each position; positions continue over all epochs."""

    def __init__(self, shard_sample_counts: Sequence[int], seed: int, window: int = WINDOW) -> None:
        """Fix the order.

        Args:
            shard_sample_counts: Samples in each shard, in index order; zeros are allowed.
            seed: Any integer; its lowest 64 bits count.
            window: Samples per shuffle window.
        """
        if not 1 <= window <= _MAX_WINDOW:
            raise ValueError(f"window={window} is not between 1 and {_MAX_WINDOW}")
        if any(count < 0 for count in shard_sample_counts):
            raise ValueError(f"a shard has a negative number of samples: {list(shard_sample_counts)}")
        self.seed = seed
        self.window = window
        self._counts: Int64s = np.asarray(list(shard_sample_counts), dtype=np.int64)
        self._starts: Int64s = np.concatenate(([0], np.cumsum(self._counts)))[:-1].astype(np.int64)
        self.samples_per_epoch = int(self._counts.sum())

    def samples_at(self, positions: npt.ArrayLike) -> Int64s:
        """The samples at many positions.

        Args:
            positions: Global positions, any shape; the epoch is ``position // samples_per_epoch``.

        Returns:
            Sample numbers in the numbering of the dataset, in the shape of ``positions``.
        """
        given: Int64s = np.asarray(positions, dtype=np.int64)
        flat = given.reshape(-1)
        if flat.size == 0:
            return given.copy()
        if self.samples_per_epoch == 0:
            raise ValueError("there are no samples to order")
        if int(flat.min()) < 0:
            raise ValueError(f"positions start at 0, got {int(flat.min())}")
        epoch, offset = np.divmod(flat, self.samples_per_epoch)
        return self.samples_in(epoch, offset).reshape(given.shape)

    def samples_in(self, epoch: Int64s, offset: Int64s) -> Int64s:
        """The samples at offsets within epochs; both have one dim."""
        shard = np.searchsorted(self._starts, offset, side="right") - 1
        local = offset - self._starts[shard]
        window_begin = local // self.window * self.window
        size = np.minimum(self.window, self._counts[shard] - window_begin)
        first = self._starts[shard] + window_begin
        index = (local - window_begin).astype(np.uint64)
        permuted = _permute(index, size.astype(np.uint64), self._keys(epoch, first))
        return first + permuted.astype(np.int64)

    def _keys(self, epoch: Int64s, first: Int64s) -> Uint64s:
        """One key per (seed, epoch, window); the first sample identifies a window."""
        seed = np.asarray([self.seed & _MASK_64], dtype=np.uint64)
        key = mix(mix(seed + GOLDEN) + epoch.astype(np.uint64) * GOLDEN)
        return mix(key ^ mix(first.astype(np.uint64) + GOLDEN))


def _permute(index: Uint64s, size: Uint64s, key: Uint64s) -> Uint64s:
    """Map ``index`` one to one onto ``range(size)``, element by element.

    The network has an even number of bits, so its domain is up to four times ``size``. Cycle walking (repeat
    until the value is in the range) makes it a bijection of the range: a cycle of a bijection that starts in
    the range returns to it.
    """
    # frexp's exponent is the bit length, exactly, for integers below 2**53.
    bits = np.frexp((size - np.uint64(1)).astype(np.float64))[1]
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    out = index.copy()
    walking = np.arange(out.size)
    while walking.size:
        out[walking] = _feistel(out[walking], half[walking], key[walking])
        walking = walking[out[walking] >= size[walking]]
    return out


def _feistel(value: Uint64s, half: Uint64s, key: Uint64s) -> Uint64s:
    """One pass of the balanced network over ``2 * half`` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for _ in range(_ROUNDS):
        key = key + GOLDEN
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << half) | right
