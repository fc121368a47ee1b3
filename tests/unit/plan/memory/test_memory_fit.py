"""Fit: the larger of two peaks with allocator and context, within 97% of the device memory."""

from __future__ import annotations

import pytest

from meshwright.plan.memory.fit import USABLE_MEMORY, MemoryNeed, describe_usable, usable_bytes

GB = 10**9


def test_cuda_needs_an_allocator_and_a_context_and_cpus_neither(make_job):
    """The allocator takes 5% of live tensors and the context 1 GB."""
    need = MemoryNeed.of(make_job(), 40 * GB, 50 * GB)
    assert (need.allocator, need.context) == (2.5 * GB, GB)
    assert need.needed_bytes == 53.5 * GB
    bare = MemoryNeed.of(make_job(cluster={"device": "cpu"}), 40 * GB, 50 * GB)
    assert (bare.allocator, bare.context, bare.needed_bytes) == (0, 0, 50 * GB)


@pytest.mark.parametrize(
    ("steady", "first", "limit"), [(3, 2, "steady step"), (2, 3, "first step"), (2, 2, "steady step")]
)
def test_the_larger_peak_is_named_and_decides(make_job, steady, first, limit):
    need = MemoryNeed.of(make_job(cluster={"device": "cpu"}), steady, first)
    assert need.limited_by == limit
    assert need.needed_bytes == max(steady, first)


def test_97_percent_of_a_device_is_usable(make_job):
    cluster = make_job().cluster
    assert USABLE_MEMORY == 0.97
    assert usable_bytes(cluster) == int(0.97 * cluster.memory_bytes)
    assert describe_usable(cluster) == "97% of 80 GB, 77.6 GB"
