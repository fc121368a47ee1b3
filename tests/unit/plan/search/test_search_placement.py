"""The search of rank placement: cases where rank order is best, and where it is not."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.plan.build import build_plan, summarize_plan
from meshwright.plan.search.placement import GAIN, PlacementSearch
from meshwright.plan.search.planner import search_job

TWO_NODES = {"nodes": 2, "devices_per_node": 2, "device": "cpu", "nic_bytes_per_s": 6.25e6}
SMALL_BATCH = {"data": {"seq_len": 8}, "train": {"global_batch": 2}}


def placed(make_job, **tables):
    return search_job(make_job(**tables)).best[0]


def judge_all(prediction):
    """The predicted step of rank order, and the shortest of all permutations."""
    ranks = prediction.layout.world_size
    every = np.array(list(itertools.permutations(range(ranks))))
    steps = PlacementSearch(prediction.job, prediction.micro_batches).judge(every)
    return steps[0], steps.min()


def test_rank_order_is_kept_where_tensor_parallelism_has_most_traffic(make_job):
    best = placed(make_job, cluster=TWO_NODES, layout={"tp": 2, "dp_replicate": 2}, data={"seq_len": 512})
    assert best.placement == ()
    assert best.placement_reason.startswith("ranks are placed in rank order: no faster one among")
    assert "tp inside nodes, dp_replicate between nodes" in best.placement_reason


def test_gradients_stay_inside_nodes_where_they_have_most_traffic(make_job):
    """Few tokens per step: the gradients of tensor parallel ranks are larger than their activations."""
    best = placed(make_job, cluster=TWO_NODES, layout={"tp": 2, "dp_replicate": 2}, **SMALL_BATCH)
    assert best.placement == (0, 2, 1, 3)
    assert "dp_replicate inside nodes, tp between nodes" in best.placement_reason
    ordered = placed(
        make_job,
        cluster=TWO_NODES,
        layout={"tp": 2, "dp_replicate": 2, "placement": "rank-order"},
        **SMALL_BATCH,
    )
    assert ordered.placement == ()
    assert best.step_s < ordered.step_s


def test_pairs_do_not_cross_nodes_that_they_do_not_divide(make_job):
    """Two nodes of three devices, four ranks: one device of each node is left out."""
    best = placed(
        make_job,
        cluster={**TWO_NODES, "devices_per_node": 3},
        layout={"tp": 2, "dp_replicate": 2},
        data={"seq_len": 512},
    )
    assert best.placement == (0, 1, 3, 4)


def test_pipelines_stay_inside_racks_where_they_have_most_traffic(make_job):
    """Four nodes in two racks: in rank order pp crosses the oversubscribed links between them."""
    racks = {"nodes": 4, "devices_per_node": 1, "nodes_per_rack": 2, "spine_oversubscription": 32.0}
    model = {"num_layers": 2, "vocab_size": 64, "hidden_size": 16, "ffn_size": 16, "num_heads": 2}
    best = placed(
        make_job,
        model={**model, "preset": None, "num_kv_heads": 2, "tied_embeddings": True},
        cluster=racks,
        layout={"pp": 2, "dp_replicate": 2, "micro_batch": 8},
        data={"seq_len": 8192},
        train={"global_batch": 128},
    )
    assert "pp between nodes, dp_replicate between racks" in best.placement_reason
    assert best.placement == (0, 2, 1, 3)


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "dp_replicate": 3}, {"cp": 2, "dp_shard": 3}, {"tp": 3, "pp": 2}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_search_finds_the_best_of_all_permutations(make_job, layout, device, nodes):
    """Six ranks on nodes that do not divide their groups."""
    cluster = {"nodes": nodes, "devices_per_node": 6 // nodes, "device": device, "nic_bytes_per_s": 1e8}
    model = {"preset": None, "num_layers": 2, "hidden_size": 96, "num_heads": 6, "num_kv_heads": 6}
    model |= {"ffn_size": 96, "vocab_size": 384, "tied_embeddings": True}
    best = placed(make_job, model=model, cluster=cluster, layout=layout, data={"seq_len": 48})
    ordered, shortest = judge_all(best)
    if best.placement:
        assert PlacementSearch(best.job, best.micro_batches).judge(np.array([best.placement]))[0] <= (
            shortest * (1 + 1e-5)
        )
        assert shortest < ordered * (1 - GAIN)
    else:
        assert shortest >= ordered * (1 - GAIN)


def test_swaps_improve_a_bad_start(make_job):
    """From a placement whose pairs all cross nodes, swaps reach the best of all permutations."""
    best = placed(make_job, cluster=TWO_NODES, layout={"tp": 2, "dp_replicate": 2}, data={"seq_len": 512})
    search = PlacementSearch(best.job, best.micro_batches)
    bad = np.array([0, 2, 1, 3])
    _, step_s = search._swap(bad, float(search.judge(bad[None])[0]))
    assert step_s == pytest.approx(judge_all(best)[1])


def test_every_axis_order_is_a_candidate_and_rank_order_the_first(make_job):
    job = make_job(cluster={"nodes": 4, "devices_per_node": 2}, layout={"pp": 2, "dp_replicate": 2, "tp": 2})
    search = PlacementSearch(search_job(job).best[0].job, 1)
    candidates = search.list_axis_orders()
    assert candidates[0].tolist() == list(range(8))
    assert all(sorted(row) == list(range(8)) for row in candidates.tolist())
    inner = {frozenset(np.flatnonzero(row // 2 == 0).tolist()) for row in candidates}
    assert {frozenset({0, 1}), frozenset({0, 2}), frozenset({0, 4})} <= inner


def test_a_given_placement_is_predicted_and_written(make_job):
    layout = {"tp": 2, "dp_replicate": 2, "placement": [2, 3, 0, 1]}
    plan = build_plan(make_job(cluster=TWO_NODES, layout=layout))[0]
    assert plan.placement == (2, 3, 0, 1)
    assert any("as given in the job" in reason for reason in plan.reasons)
    assert summarize_plan(plan)["placement"] == [[1, 0], [1, 1], [0, 0], [0, 1]]
    crossing = build_plan(make_job(cluster=TWO_NODES, layout={**layout, "placement": [0, 2, 1, 3]}))[0]
    assert crossing.breakdown_s["tensor parallel"] > plan.breakdown_s["tensor parallel"]


def test_open_layouts_keep_the_rule_of_the_job(make_job):
    """The search itself does not know the placement."""
    job = make_job(cluster={**TWO_NODES, "nic_bytes_per_s": 1e9}, layout={"placement": "rank-order"})
    found = search_job(job)
    assert {one.layout.placement for one in found.best} == {"rank-order"}
    assert {one.placement for one in found.best} == {()}


def test_one_node_has_no_reason(make_job):
    best = placed(make_job, layout={"dp_replicate": 2})
    assert (best.placement, best.placement_reason) == ((), "")


def test_host_memory_is_that_of_the_ranks_on_a_node(make_job):
    """Pipeline ranks with different memory: both large ones on one node need more of it."""
    layout = {"pp": 2, "dp_replicate": 2, "micro_batch": 1}
    apart, together = (
        build_plan(make_job(cluster=TWO_NODES, layout={**layout, "placement": slots}))[0]
        for slots in ([0, 2, 1, 3], [0, 1, 2, 3])
    )
    assert apart.host_memory.ranks == together.host_memory.ranks == 2
    assert apart.host_memory.training_bytes < together.host_memory.training_bytes
    assert dataclasses.asdict(apart.ranks[0]) == dataclasses.asdict(together.ranks[0])
