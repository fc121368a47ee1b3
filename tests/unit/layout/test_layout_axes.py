"""Axes of sharding and gradient reduction: names, groups, and every element owned exactly once."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legal_layouts import list_legal_jobs
from meshwright.layout.axes import (
    Axis,
    axis_rank,
    dense_reduce_axis,
    dense_shard_axis,
    expert_axis,
    expert_reduce_axis,
    expert_shard_axis,
    gradient_axis,
    has_expert_axes,
    is_expert,
    is_sharded,
    list_group_axes,
    list_rank_groups,
    sequence_axis,
    state_axis,
)
from meshwright.layout.ddp_buckets import local_buckets
from meshwright.layout.fsdp_groups import chunk_rows, count_sharded, list_groups, sharded_state_bytes
from meshwright.layout.parameters import list_parameters
from meshwright.layout.stages import list_stages, local_parameters, pp_rank_of
from meshwright.layout.tensor_parallel import (
    LocalDecoder,
    count_kv_replicas,
    is_kv_projection,
    is_tp_replicated,
    local_model,
)
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.load import build_job

MODEL = {
    "preset": None, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 16,
    "vocab_size": 32, "ffn_bias": True,
}  # fmt: skip
EXPERTS = {**MODEL, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8}
ALONE = Axis("", 1)


def joined(job):
    """The axes of a run that are not axes of the dense mesh."""
    return [name for name in list_group_axes(job) if name not in AXES]


@pytest.mark.parametrize(
    ("degrees", "shards", "sums"),
    [
        ({}, ALONE, ALONE),
        ({"dp_replicate": 2}, ALONE, ("dp_replicate", 2)),
        ({"cp": 2}, ALONE, ("cp", 2)),
        ({"dp_replicate": 2, "cp": 4}, ALONE, ("dp_replicate+cp", 8)),
        ({"cp": 2, "zero": 1}, ("cp", 2), ("cp", 2)),
        ({"dp_shard": 2, "zero": 1}, ("dp_shard", 2), ("dp_shard", 2)),
        ({"dp_shard": 2, "cp": 2, "zero": 1}, ("dp_shard+cp", 4), ("dp_shard+cp", 4)),
        (
            {"dp_replicate": 3, "dp_shard": 2, "cp": 2, "zero": 1},
            ("dp_shard+cp", 4),
            ("dp_replicate+dp_shard+cp", 12),
        ),
        ({"dp_replicate": 3, "dp_shard": 2, "cp": 2, "zero": 3}, ("dp_shard+cp", 4), ("dp_replicate", 3)),
        ({"cp": 2, "tp": 2, "zero": 2}, ("cp", 2), ALONE),
    ],
)
def test_dense_shard_and_reduce_axes_by_zero_stage(degrees, shards, sums):
    layout = Layout(**degrees)
    assert (dense_shard_axis(layout), dense_reduce_axis(layout)) == (shards, sums)


@pytest.mark.parametrize(
    ("degrees", "experts", "shards", "sums"),
    [
        ({"tp": 2}, ALONE, ALONE, ("ep_shard", 2)),
        ({"tp": 2, "ep": 2}, ("ep", 2), ALONE, ALONE),
        ({"tp": 2, "etp": 2}, ("ep", 2), ALONE, ALONE),
        ({"tp": 2, "ep": 2, "dp_replicate": 2}, ("ep", 2), ALONE, ("dp_replicate", 2)),
        ({"cp": 4, "ep": 2, "dp_replicate": 2}, ("ep", 2), ALONE, ("dp_replicate+ep_shard", 4)),
        ({"dp_shard": 8, "ep": 2, "etp": 2, "zero": 1}, ("ep", 4), ("ep_shard", 2), ("ep_shard", 2)),
        (
            {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 2, "zero": 3},
            ("ep", 2),
            ("ep_shard", 4),
            ("dp_replicate", 2),
        ),
    ],
)
def test_experts_are_sharded_over_ep_shard(degrees, experts, shards, sums):
    layout = Layout(**degrees)
    assert (expert_axis(layout), expert_shard_axis(layout), expert_reduce_axis(layout)) == (
        experts,
        shards,
        sums,
    )


def test_groups_of_ranks_by_hand():
    """16 ranks are two replicas of dp_shard=2 x cp=2 x tp=2. Experts use groups of ep x etp = 4."""
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2, etp=2, zero=1)
    assert list_rank_groups(layout, "dp_shard+cp")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list_rank_groups(layout, "dp_replicate+dp_shard+cp")[0] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert list_rank_groups(layout, "ep")[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert list_rank_groups(layout, "ep_shard")[:2] == [[0, 4], [1, 5]]
    assert list_rank_groups(layout, "dp_replicate+ep_shard")[3] == [3, 7, 11, 15]
    assert list_rank_groups(layout, "cp+tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert [axis_rank(layout, 13, axis) for axis in ("tp", "cp", "ep", "ep_shard", "dp_shard+cp", "")] == [
        1, 0, 1, 1, 2, 0,
    ]  # fmt: skip


def test_pp_is_the_outermost_axis_of_both_meshes():
    layout = Layout(pp=2, dp_shard=2, tp=2, ep=2, zero=3)
    assert list_rank_groups(layout, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list_rank_groups(layout, "ep_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_experts_have_their_own_axes_if_their_ranks_differ(make_job):
    assert not has_expert_axes(make_job(model=EXPERTS, layout={"dp_shard": 2, "cp": 2, "micro_batch": 2}))
    assert not has_expert_axes(make_job(model=MODEL, layout={"tp": 2, "micro_batch": 2}))
    for degrees in ({"tp": 2}, {"cp": 2, "ep": 2}, {"dp_shard": 2, "etp": 2}):
        assert has_expert_axes(make_job(model=EXPERTS, layout={**degrees, "micro_batch": 2}))


def test_each_parameter_has_its_gradient_and_state_axis(make_job):
    job = make_job(model=EXPERTS, layout={"dp_shard": 2, "cp": 2, "ep": 2, "zero": 1, "micro_batch": 2})
    expert, router = "blocks.0.ffn.experts.up.weight", "blocks.0.ffn.router.weight"
    assert (state_axis(job, expert), gradient_axis(job, expert)) == (("ep_shard", 2), ("ep_shard", 2))
    assert (state_axis(job, router), gradient_axis(job, router)) == (("dp_shard+cp", 4), ("dp_shard+cp", 4))
    assert joined(job) == ["dp_shard+cp", "ep", "ep_shard"]
    together = make_job(model=EXPERTS, layout={"dp_shard": 2, "zero": 1, "micro_batch": 2})
    assert state_axis(together, expert) == state_axis(together, router) == ("dp_shard", 2)
    assert joined(together) == []


def test_shared_experts_and_the_router_are_not_routed_experts():
    names = ("blocks.0.ffn.shared.up.weight", "blocks.0.ffn.router.weight", "blocks.0.ffn.up.weight")
    assert not any(map(is_expert, names))


def test_joined_axes_have_process_groups_beside_the_mesh():
    degrees = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 4, "zero": 1, "micro_batch": 2}
    job = build({"model": EXPERTS, "layout": degrees})
    assert joined(job) == [
        "dp_shard+cp",
        "dp_replicate+dp_shard+cp",
        "ep",
        "cp+tp",
        "ep_shard",
        "dp_replicate+ep_shard",
    ]
    assert sequence_axis(job.layout) == ("cp+tp", 4)


@pytest.mark.parametrize(
    ("degrees", "cut"),
    [
        ({"dp_replicate": 2}, False),
        ({"cp": 2}, False),
        ({"cp": 2, "zero": 1}, True),
        ({"cp": 2, "ep": 2}, True),
        ({"tp": 2}, True),
    ],
)
def test_state_is_sharded_if_ranks_hold_different_parts(make_job, degrees, cut):
    assert is_sharded(make_job(model=EXPERTS, layout={**degrees, "micro_batch": 2})) is cut


# Parameters of a rank


def test_rank_holds_some_columns_of_some_experts():
    """E=4, F=8, D=8 over ep=2 x etp=2: two experts with four columns each. The router is not sharded."""
    tables = {"model": EXPERTS, "layout": {"dp_shard": 4, "ep": 2, "etp": 2, "micro_batch": 2}}
    shapes = {p.name: p.shape for p in list_parameters(local_model(build(tables)))}
    assert shapes["blocks.1.ffn.experts.gate.weight"] == (2 * 4, 8)
    assert shapes["blocks.1.ffn.experts.gate.bias"] == (2 * 4,)
    assert shapes["blocks.1.ffn.experts.down.weight"] == (2 * 8, 4)
    assert shapes["blocks.1.ffn.experts.down.bias"] == (2 * 8,)
    assert shapes["blocks.1.ffn.router.weight"] == (4, 8)


def test_tp_splits_shared_experts_but_not_routed_ones():
    model = {**EXPERTS, "shared_experts": 2, "expert_ffn_size": None}
    held = local_model(build({"model": model, "layout": {"tp": 2, "micro_batch": 2}}))
    shapes = {p.name: p.shape for p in list_parameters(held)}
    assert isinstance(held, LocalDecoder)
    assert shapes["blocks.0.ffn.shared.up.weight"] == (2 * 16 // 2, 8)
    assert shapes["blocks.0.ffn.experts.up.weight"] == (4 * 16, 8)
    assert shapes["blocks.0.ffn.router.weight"] == (4, 8)


def test_separate_experts_are_fsdp_groups_before_their_block():
    tables = {
        "model": {**EXPERTS, "dense_layers": 1},
        "layout": {"dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 2},
    }
    (part,) = list_stages(build(tables))
    groups = list_groups(part)
    assert [g.name for g in groups] == [
        "blocks.0",
        "blocks.1.ffn.experts",
        "blocks.1",
        "around the blocks",
    ]
    assert [g.experts for g in groups] == [False, True, False, False]
    assert sorted(p.name for g in groups for p in g.parameters) == sorted(p.name for p in part.parameters)
    tables["layout"] = {"dp_shard": 2, "zero": 3, "micro_batch": 2}
    (part,) = list_stages(build(tables))
    assert [g.name for g in list_groups(part)] == ["blocks.0", "blocks.1", "around the blocks"]


def test_buckets_do_not_mix_separate_experts_with_dense_parameters():
    job = build({"model": EXPERTS, "layout": {"cp": 2, "ep": 2, "micro_batch": 2}})
    dense, experts = local_buckets(job, pp_rank=0)
    assert not any(map(is_expert, dense))
    assert all(map(is_expert, experts))
    together = build({"model": EXPERTS, "layout": {"cp": 2, "micro_batch": 2}})
    assert len(local_buckets(together, pp_rank=0)) == 1


def build(tables):
    """A job with at most 16 ranks."""
    tree = {
        "name": "small",
        "cluster": {"preset": "h100-sxm", "nodes": 2},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 16},
    }
    return build_job(tree | tables)


@functools.cache
def legal_jobs():
    """All legal layouts of an MoE model with biases on at most 16 ranks, with degrees up to four."""
    return list(list_legal_jobs(build({"model": EXPERTS, "layout": {"micro_batch": 1}})))


def jobs():
    """A sample of them."""
    return st.deferred(lambda: st.sampled_from(legal_jobs()))


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_every_element_of_the_state_is_owned_once_in_every_replica(job):
    """The elements of all ranks together are the model, once per replica and tp copy."""
    layout = job.layout
    whole = {p.name: p.count for p in list_parameters(job.model)}
    owned = Counter()
    for rank in range(layout.world_size):
        for parameter in local_parameters(job, pp_rank_of(job, rank)):
            owned[parameter.name] += count_sharded(job, parameter, rank)
    shards = dense_shard_axis(layout).size
    for name, count in whole.items():
        replicas = layout.dp_replicate * layout.dp_shard * layout.cp // shards
        if is_expert(name):
            ranks = layout.dp_shard * layout.cp * layout.tp
            replicated_over_etp = name.endswith("down.bias")
            sharded = layout.ep if replicated_over_etp else expert_axis(layout).size
            axis = expert_shard_axis(layout) if has_expert_axes(job) else dense_shard_axis(layout)
            copies = layout.dp_replicate * ranks // (sharded * axis.size)
        elif is_tp_replicated(name):
            copies = replicas * layout.tp
        else:
            copies = replicas * (count_kv_replicas(job.model, layout.tp) if is_kv_projection(name) else 1)
        assert owned[name] == count * copies, name


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_every_row_of_every_expert_is_owned_once_in_every_replica(job):
    """Rows are identified by expert and column in the full model."""
    layout, name = job.layout, "blocks.1.ffn.experts.up.weight"
    owners = Counter()
    for rank in range(layout.world_size):
        held = {p.name: p for p in local_parameters(job, pp_rank_of(job, rank))}.get(name)
        if held is None:
            continue
        ep_rank, column = divmod(axis_rank(layout, rank, "ep"), layout.etp)
        axis = state_axis(job, name)
        each = held.shape[0] // (4 // layout.ep)
        for row in chunk_rows(held.shape[0], axis.size, axis_rank(layout, rank, axis.name)):
            expert, inner = divmod(row, each)
            owners[ep_rank * (4 // layout.ep) + expert, column * each + inner] += 1
    assert set(owners) == {(expert, inner) for expert in range(4) for inner in range(8)}
    ranks = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
    assert set(owners.values()) == {ranks // (layout.ep * layout.etp * state_axis(job, name).size)}


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_state_bytes_of_all_ranks_follow_from_their_parameters(job):
    """Each rank has two moments per element that it owns and a step count per tensor."""
    for rank in range(0, job.layout.world_size, 3):
        parameters = local_parameters(job, pp_rank_of(job, rank))
        own = sum(count_sharded(job, p, rank) for p in parameters)
        state = sharded_state_bytes(job, rank)
        assert state["optimizer"] == 8 * own + 4 * len(parameters)
        assert state["parameters"] >= 4 * own
        if job.layout.zero < 2:
            assert state["parameters"] == 4 * sum(p.count for p in parameters)


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_groups_of_an_axis_partition_the_ranks(job):
    """Every rank is in one group, all groups have the same size, and axis ranks follow the order."""
    layout = job.layout
    for axis in {*list_group_axes(job), "pp", "tp", "cp"}:
        groups = list_rank_groups(layout, axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert len({len(group) for group in groups}) == 1
        for group in groups:
            assert [axis_rank(layout, rank, axis) for rank in group] == list(range(len(group)))
