"""The sample order: frozen values, a bijection, unchanged by appended data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.order import SampleOrder

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15

shard_counts = st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(sum)
seeds = st.integers(-(2**70), 2**70)
windows = st.integers(1, 40)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference(counts: list[int], seed: int, window: int, position: int) -> int:
    """The documented order in plain Python integers."""
    epoch, rest = divmod(position, sum(counts))
    first = 0
    for count in counts:
        if rest < count:
            break
        rest, first = rest - count, first + count
    begin = rest // window * window
    size, first, value = min(window, count - begin), first + begin, rest - begin
    key = mix((mix((seed + GOLDEN) & MASK) + epoch * GOLDEN) & MASK)
    key = mix(key ^ mix((first + GOLDEN) & MASK))
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right, round_key = value >> half, value & ((1 << half) - 1), key
        for _ in range(8):
            round_key = (round_key + GOLDEN) & MASK
            left, right = right, left ^ (mix(right ^ round_key) & ((1 << half) - 1))
        value = left << half | right
        if value < size:
            return first + value


def test_sample_order_is_frozen():
    """These values never change. Runs of older versions resume with them."""
    small = SampleOrder([10, 3, 0, 7], seed=42, window=4).samples_at(np.arange(40)).tolist()
    assert small[:20] == [1, 2, 0, 3, 7, 4, 6, 5, 9, 8, 10, 11, 12, 16, 13, 15, 14, 17, 18, 19]
    assert small[20:] == [0, 1, 3, 2, 5, 4, 7, 6, 9, 8, 12, 11, 10, 13, 16, 14, 15, 18, 19, 17]
    positions = [0, 1, 2, 65535, 65536, 99999, 100000, 100007, 10**12]
    large = SampleOrder([100000, 7], seed=0).samples_at(positions).tolist()
    assert large == [13445, 31264, 25430, 30014, 85382, 88967, 100003, 33358, 54728]


@given(shard_counts, seeds, windows, st.integers(0, 2**40))
def test_sample_order_matches_the_reference(counts, seed, window, position):
    """NumPy overflow and type promotion have no influence."""
    expected = reference(counts, seed, window, position)
    assert SampleOrder(counts, seed, window).samples_at([position]).tolist() == [expected]


@given(shard_counts, seeds, windows, st.integers(0, 10**6))
def test_epoch_reads_every_sample_once(counts, seed, window, epoch):
    order = SampleOrder(counts, seed, window)
    positions = epoch * order.samples_per_epoch + np.arange(order.samples_per_epoch)
    assert sorted(order.samples_at(positions).tolist()) == list(range(sum(counts)))


@given(shard_counts, shard_counts, seeds, windows)
def test_appended_shards_do_not_reorder_samples(counts, more, seed, window):
    positions = np.arange(sum(counts))
    before = SampleOrder(counts, seed, window).samples_at(positions)
    after = SampleOrder(counts + more, seed, window).samples_at(positions)
    assert before.tolist() == after.tolist()


@given(shard_counts, seeds, windows)
def test_samples_are_shuffled_within_their_window_only(counts, seed, window):
    order = SampleOrder(counts, seed, window)
    first = 0
    for count in counts:
        for begin in range(0, count, window):
            size = min(window, count - begin)
            here = first + begin + np.arange(size)
            assert sorted(order.samples_at(here).tolist()) == here.tolist()
        first += count


@settings(max_examples=20)
@given(seeds)
def test_order_differs_by_epoch_seed_and_window(seed):
    """256 samples have the same order by chance once in 256! times."""
    order = SampleOrder([512], seed, window=256)
    first, second = order.samples_at(np.arange(256)), order.samples_at(np.arange(256, 512)) - 256
    assert first.tolist() != second.tolist()
    assert first.tolist() != order.samples_at(512 + np.arange(256)).tolist()
    assert first.tolist() != SampleOrder([512], seed + 1, window=256).samples_at(np.arange(256)).tolist()
    assert first.tolist() != list(range(256))


def test_shuffle_is_uniform():
    """Over 4,000 epochs each of 10 samples comes first about 400 times. Five standard deviations are 95."""
    first = SampleOrder([10], seed=1).samples_at(10 * np.arange(4000))
    assert np.abs(np.bincount(first, minlength=10) - 400).max() < 95


def test_scalar_and_array_positions_give_the_same_samples():
    order = SampleOrder([1000, 77], seed=3, window=64)
    positions = np.arange(2000).reshape(20, 100)
    together = order.samples_at(positions)
    assert together.shape == (20, 100)
    assert together.dtype == np.int64
    assert [int(order.samples_at(p)) for p in range(2000)] == together.reshape(-1).tolist()


def test_invalid_arguments_raise_value_errors():
    with pytest.raises(ValueError, match="window=0"):
        SampleOrder([4], seed=0, window=0)
    with pytest.raises(ValueError, match="negative number of samples"):
        SampleOrder([4, -1], seed=0)
    with pytest.raises(ValueError, match="positions start at 0, got -3"):
        SampleOrder([4], seed=0).samples_at([-3])
    with pytest.raises(ValueError, match="no samples"):
        SampleOrder([0], seed=0).samples_at([0])
    assert SampleOrder([], seed=0).samples_at([]).size == 0
