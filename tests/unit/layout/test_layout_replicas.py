"""Which ranks have replicas, and which of them differ."""

from __future__ import annotations

import pytest

from meshwright.layout.replicas import find_differing_ranks, has_replicas, list_replica_axes
from meshwright.spec.load import load_job

EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.num_layers=2", "layout.zero=1")


@pytest.fixture
def load(job_file):
    return lambda *overrides: load_job(str(job_file), overrides)


@pytest.mark.parametrize(
    ("layout", "sums", "expected"),
    [
        ("layout.dp_replicate=3", [7, 7, 7], []),
        ("layout.dp_replicate=3", [7, 8, 7], [1]),
        ("layout.dp_replicate=2", [7, 8], [0, 1]),
        ("layout.dp_replicate=4", [7, 7, 8, 8], [0, 1, 2, 3]),
        ("layout.dp_replicate=3", [7, 8, 9], [0, 1, 2]),
        ("layout.dp_replicate=3 layout.tp=2", [1, 2, 1, 2, 1, 3], [5]),
        ("layout.pp=2 layout.dp_replicate=2", [1, 1, 2, 3], [2, 3]),
        ("layout.dp_shard=2 layout.zero=1", [4, 4], []),
        ("layout.dp_replicate=3 layout.dp_shard=2", [1, 2, 9, 2, 1, 2], [2]),
    ],
)
def test_the_minority_of_each_group_is_named(load, layout, sums, expected):
    """Without a majority the whole group is. Shards of ranks that are no replicas may differ."""
    assert find_differing_ranks(load(*layout.split()), [[value] for value in sums]) == expected


def test_experts_are_compared_with_the_ranks_that_have_the_same_ones(load):
    job = load(*EXPERTS, "layout.dp_shard=4", "layout.ep=2")
    assert [axis.size for axis in list_replica_axes(job)] == [4, 2]
    sums = [[1, 5], [1, 6], [1, 5], [1, 6]]
    assert find_differing_ranks(job, sums) == []
    sums[3][1] = 7
    assert find_differing_ranks(job, sums) == [1, 3]
    sums[3] = [2, 6]
    assert find_differing_ranks(job, sums) == [3]


@pytest.mark.parametrize(
    "layout", ["layout.dp_replicate=1", "layout.dp_shard=2", "layout.tp=2", "layout.pp=2"]
)
def test_layouts_without_replicas(load, layout):
    assert not has_replicas(load(layout))
