"""Layouts for the devices that a run has left: the degrees that may change, and how many are needed."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.core.errors import UserError
from meshwright.launch.placement import Device
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.runs.replan import find_layout, place_on, shrink_cluster
from meshwright.spec.load import build_job

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32}


def plan(may_change="data", model=(), per_node=None, all_reduce="backend", global_batch=24, **layout):
    ranks = layout.get("ranks", 1)
    for degree in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        ranks *= layout.get(degree, 1)
    per_node = per_node or ranks
    tree = {
        "name": "replan",
        "model": {"preset": "tiny", "num_layers": 4, **dict(model)},
        "data": {"path": "text", "seq_len": 32},
        "train": {
            "steps": 1,
            "global_batch": global_batch,
            "block_backend": "eager",
            "all_reduce": all_reduce,
        },
        "cluster": {
            "preset": "local",
            "device": "cpu",
            "devices_per_node": per_node,
            "nodes": ranks // per_node,
        },
        "layout": layout,
        "elastic": {"may_change": may_change},
    }
    return build_plan(build_job(tree))[0]


def on(*counts):
    """Devices of nodes with these numbers of them."""
    return frozenset(Device(node, number) for node, count in enumerate(counts) for number in range(count))


def degrees(plan):
    layout = plan.job.layout
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero")
    return {name: getattr(layout, name) for name in names if getattr(layout, name) not in (0, 1)}


@pytest.mark.parametrize(
    ("layout", "left", "expected"),
    [
        ({"dp_replicate": 4}, 3, {"dp_replicate": 3}),
        ({"dp_replicate": 4}, 1, {}),
        ({"dp_shard": 4}, 3, {"dp_shard": 3, "zero": 3}),
        ({"dp_shard": 4}, 1, {}),
        ({"dp_shard": 4, "zero": 1}, 2, {"dp_shard": 2, "zero": None}),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, {"dp_shard": 3, "zero": 3}),
        ({"dp_replicate": 4, "dp_shard": 2}, 5, {"dp_shard": 5, "zero": 3}),
        ({"dp_replicate": 4, "dp_shard": 2}, 6, {"dp_replicate": 3, "dp_shard": 2, "zero": 3}),
        ({"pp": 2, "tp": 2, "dp_replicate": 2}, 6, {"pp": 2, "tp": 2}),
        ({"pp": 2, "dp_replicate": 3}, 5, {"pp": 2, "dp_replicate": 2}),
    ],
)
def test_only_data_parallel_degrees_change(layout, left, expected):
    found = find_layout(plan(**layout), on(left))
    expected = {name: value for name, value in expected.items() if value is not None}
    assert expected.items() <= degrees(found).items()
    assert found.world_size <= left
    assert found.job.train.global_batch == 24
    assert "devices are left" in found.reasons[0]


@pytest.mark.parametrize(
    ("left", "replicas", "backups"), [(4, 4, 1), (3, 3, 0), (2, 2, 0), (1, 1, 0)], ids=str
)
def test_backup_replicas_are_left_out_first(left, replicas, backups):
    """Three slices and two backups: as long as there are three devices, no slice grows."""
    found = find_layout(plan(dp_replicate=5, backup_replicas=2), on(left))
    assert (found.job.layout.dp_replicate, found.job.layout.backup_replicas) == (replicas, backups)
    assert any(f"backup_replicas={backups} instead of 2" in reason for reason in found.reasons)


def test_experts_are_split_over_fewer_ranks():
    found = find_layout(plan(model=EXPERTS, dp_shard=4, ep=4, zero=3), on(3))
    assert degrees(found) == {"dp_shard": 3, "zero": 3}
    assert degrees(find_layout(plan(model=EXPERTS, dp_shard=4, ep=4, zero=3), on(2)))["ep"] == 2


@pytest.mark.parametrize("left", [(6,), (4, 2), (3, 3), (5,), (1,)])
def test_any_layout_for_the_devices_that_are_left(left):
    """Nodes with different numbers of devices, too."""
    found = find_layout(plan("any", per_node=4, pp=2, tp=2, dp_replicate=2), on(*left))
    assert 1 <= found.world_size <= sum(left)


def test_devices_are_left_idle_where_all_of_them_have_no_good_layout():
    """Of seven devices only one has a layout for a batch of 4 and 4 layers. Of six, three and two have."""
    full = plan("any", per_node=2, global_batch=4, pp=2, dp_replicate=4)
    left = on(2, 2, 1, 2)
    found = find_layout(full, left)
    assert 1 < found.world_size <= 6
    placed = place_on(full, found, left)
    assert len(placed.devices) == found.world_size
    assert Device(2, 0) not in placed.devices, "whole nodes first"


def test_the_layout_of_all_devices_is_the_first_plan():
    full = plan(dp_replicate=4)
    assert find_layout(full, on(4)) is full


def test_too_few_devices_are_refused_with_the_number_that_would_do():
    with pytest.raises(UserError, match="2 devices: one replica needs 4 devices") as caught:
        find_layout(plan(pp=2, tp=2, dp_replicate=2), on(2))
    assert caught.value.problems[0].code == "elastic-no-layout"
    assert "4 devices would do" in str(caught.value)


def test_no_device_is_refused():
    with pytest.raises(UserError, match=r"no device is left.*\[elastic-no-layout\]"):
        find_layout(plan(dp_replicate=2), frozenset())


@pytest.mark.parametrize(
    ("left", "nodes", "per_node"), [((4, 4), 2, 4), ((4, 2), 3, 2), ((4, 3), 7, 1), ((3,), 1, 3)]
)
def test_the_cluster_has_as_many_devices_as_are_left(left, nodes, per_node):
    cluster = shrink_cluster(plan(dp_replicate=8, per_node=4).job.cluster, on(*left))
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, per_node)


def test_another_layout_places_its_ranks_anew():
    """The slots of the plan are the devices that are left; a list of slots was that of the first layout."""
    full = plan(per_node=2, tp=2, dp_replicate=3, placement=[0, 2, 1, 3, 4, 5])
    left = frozenset(Device(node, number) for node in (0, 2) for number in (0, 1))
    found = find_layout(full, left)
    assert (found.job.layout.placement, found.world_size) == ("auto", 4)
    devices = sorted(left)
    placed = dataclasses.replace(found, placement=(0, 2, 1, 3))
    assert place_on(full, placed, left).devices == tuple(devices[slot] for slot in (0, 2, 1, 3))
    assert place_on(full, dataclasses.replace(found, placement=()), left).devices == tuple(devices)


@pytest.mark.parametrize("may_change", ["data", "any"])
def test_rank_order_that_the_job_names_is_kept(may_change):
    full = plan(may_change, per_node=2, tp=2, dp_replicate=3, placement="rank-order")
    found = find_layout(full, frozenset(Device(node, number) for node in (0, 2) for number in (0, 1)))
    assert (found.job.layout.placement, found.placement) == ("rank-order", ())


@pytest.mark.parametrize("may_change", ["data", "any"])
@pytest.mark.parametrize("left", [(2, 1), (1, 0)])
def test_ranks_can_read_the_plan_of_a_run_with_a_hierarchical_all_reduce(tmp_path, may_change, left):
    """A layout that cannot run it leaves the all-reduce to the backend, and says so."""
    full = plan(may_change, per_node=2, all_reduce="hierarchical", dp_replicate=4)
    found = find_layout(full, on(*left))
    write_plan(found, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").job == found.job
    changed = found.job.train.all_reduce == "backend"
    assert changed == any("train.all_reduce=backend" in reason for reason in found.reasons)
    assert changed or found.world_size > 1
