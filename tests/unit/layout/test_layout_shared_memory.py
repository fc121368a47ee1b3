"""The shared memory of process groups: regions that do not overlap, and its size in the plan."""

from __future__ import annotations

import pytest

from meshwright.layout.shared_memory import (
    BUFFERS,
    LEAST_SLOT_BYTES,
    LINE,
    MOST_SLOT_BYTES,
    PAGE,
    collective_bytes,
    list_regions,
    region_bytes,
    slot_bytes,
)
from meshwright.spec.load import load_job


def test_regions_follow_each_other_in_whole_pages():
    regions = list_regions([range(4), (0, 1), (2, 3), range(100)])
    assert [region.offset for region in regions[1:]] == [region.end for region in regions[:-1]]
    for region in regions:
        assert region.offset % PAGE == region.data_offset % PAGE == region.slot_bytes % PAGE == 0
        assert region.data_offset - region.offset >= 64 * len(region.ranks)
        assert region.end - region.data_offset == BUFFERS * len(region.ranks) * region.slot_bytes


def test_slots_of_large_groups_are_smaller():
    assert slot_bytes(2) == slot_bytes(8) == MOST_SLOT_BYTES
    assert slot_bytes(16) == MOST_SLOT_BYTES // 2
    assert slot_bytes(1000) == LEAST_SLOT_BYTES
    assert slot_bytes(10_000) >= 10_000 * LINE, "a line for each rank: reduce-scatter has a share for each"


@pytest.mark.parametrize(
    ("degrees", "sizes"),
    [
        (["layout.dp_replicate=2"], [2, 2]),  # control, dp_replicate
        (["layout.dp_replicate=2", "layout.tp=2"], [4, 2, 2, 2, 2]),
        (  # control, dp_replicate, tied embeddings; pp only sends and receives
            ["layout.pp=2", "layout.dp_replicate=2", "layout.stage_layers=[1,1]"],
            [4, 2, 2, 2, 2],
        ),
    ],
)
def test_the_memory_of_all_groups_with_collectives(job_file, degrees, sizes):
    job = load_job(job_file, degrees)
    ranks = range(job.layout.world_size)
    assert collective_bytes(job, ranks) == sum(region_bytes(size) for size in sizes)
    assert collective_bytes(job, [0]) == 0  # the other ranks are on other nodes
