"""Single layouts: parts that add up, walked schedules, bytes by hand, neighbours, remedies, the nearest."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.plan.contract import read_plan, write_plan
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.enumerate import Space
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.nearest import distance, find_nearest
from meshwright.plan.search.neighbours import compare, explain_neighbours, list_neighbours
from meshwright.plan.search.predict import layout_overrides, layout_words, predict_layouts
from meshwright.plan.search.rescue import remedies_for_layout, remedies_for_search
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.plan.search.traffic import bytes_by_axis, list_traffic, tier_of
from meshwright.plan.search.write import estimated_plan
from meshwright.plan.shapes import count_active_matmul_parameters, count_parameters
from meshwright.plan.time.flops import flops_per_token
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.load import apply_override, build_job, job_tree

TABLES = {"cluster": {"nodes": 2}, "train": {"global_batch": 32}, "data": {"seq_len": 2048}}
PIPELINE = Layout(mode="given", pp=4, tp=2, dp_shard=2, zero=1, micro_batch=1)


def best_of(job, top=1):
    found = find_layouts(job, {}, top)
    return predict_layouts(job, [found.best.grid.layout(n) for n in range(len(found.best))])


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "gpipe"])
def test_the_parts_add_up_and_the_schedule_was_walked(make_job, schedule):
    job = make_job("llama3-8b", **TABLES)
    stages = {"interleaved": 4, "zbv": 2}.get(schedule, 1)
    layout = dataclasses.replace(PIPELINE, schedule=schedule, virtual_stages=stages)
    (found,) = predict_layouts(job, [layout])
    assert found.walked
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s)
    assert sum(found.lines.values()) == pytest.approx(found.peak_bytes)
    assert max(found.peaks.values()) == pytest.approx(found.peak_bytes)
    assert found.ledger.peak_bytes == pytest.approx(found.peak_bytes, rel=1e-6)
    low, high = found.interval_s
    assert low <= found.step_s <= high
    (closed,) = predict_layouts(job, [layout], walk=False)
    assert not closed.walked
    # The head's gradients are in the forward pass: GPipe's two phases have different slowest stages.
    assert found.step_s == pytest.approx(closed.step_s, rel=0.1 if schedule == "gpipe" else 0.05)


def test_walked_bubbles_are_those_of_the_books(make_job):
    """1F1B waits (pp - 1) / m of the work; interleaving divides it by the stages of a rank."""
    job = make_job("llama3-8b", model={"vocab_size": 8}, **TABLES)
    plain, cut = predict_layouts(
        job,
        [PIPELINE, dataclasses.replace(PIPELINE, schedule="interleaved", virtual_stages=4)],
    )
    assert plain.breakdown_s["bubble"] / cut.breakdown_s["bubble"] == pytest.approx(4, rel=0.1)
    work = sum(plain.breakdown_s.get(n, 0.0) for n in ("compute", "tensor parallel"))
    assert plain.breakdown_s["bubble"] == pytest.approx(work * 3 / 16, rel=0.05)


def test_the_summary_has_the_keys_of_interfaces(make_job):
    (found,) = predict_layouts(make_job("llama3-8b", **TABLES), [PIPELINE])
    assert set(found.summary()) >= {
        "layout", "step_s", "step_s_low", "step_s_high", "tokens_per_s_per_device", "mfu", "memory_bytes",
        "breakdown_s", "collectives", "reasons",
    }  # fmt: skip
    memory = found.summary()["memory_bytes"]
    assert set(memory) == {"first", "middle", "last"}
    assert sum(line["bytes"] for line in memory[found.fullest]["lines"]) == pytest.approx(
        found.peak_bytes, rel=1e-6
    )


def test_flops_of_a_token_follow_windows_and_latent_heads(make_job):
    """Dense: 6 for each matrix element and 6 s h a layer; a window cuts it; latent heads are wider."""
    model = make_job("llama3-8b").model
    dense = 6.0 * (count_parameters(model) - 128256 * 4096)
    assert flops_per_token(model, 8192) == pytest.approx(dense + 6 * 32 * 8192 * 4096)
    windowed = dataclasses.replace(model, window=1024)
    seen = 1024 - 1024**2 / (2 * 8192)
    assert flops_per_token(windowed, 8192) == pytest.approx(dense + 12 * 32 * seen * 4096)
    latent = make_job("deepseek-v3").model
    attention = flops_per_token(latent, 8192) - 6.0 * count_active_matmul_parameters(latent)
    assert attention == pytest.approx(6 * 61 * 4096 * 128 * (192 + 128))


def test_of_experts_only_the_chosen_ones_multiply(make_job):
    """Mixtral: 12.9 of 46.7 billion parameters are active as published, the input table not counted."""
    model = make_job("mixtral-8x7b").model
    assert count_parameters(model) == pytest.approx(46.7e9, rel=0.005)
    assert count_active_matmul_parameters(model) == pytest.approx(12.9e9 - 32000 * 4096, rel=0.005)
    deepseek = make_job("deepseek-v3").model
    assert count_parameters(deepseek) == pytest.approx(671e9, rel=0.01)
    assert count_active_matmul_parameters(deepseek) == pytest.approx(37e9, rel=0.03)


# The micro-batch of a given layout


def test_a_given_layout_gets_the_largest_micro_batch_that_fits_and_leaves_two_a_stage(make_job):
    job = make_job("llama3-8b", **TABLES)
    settled = settle_micro_batch(job, dataclasses.replace(PIPELINE, micro_batch=None))
    share = 16
    sizes = [dataclasses.replace(PIPELINE, micro_batch=m) for m in range(1, share // (2 * 4) + 1)]
    fitting = [p.layout.micro_batch for p in predict_layouts(job, sizes, walk=False) if p.fits]
    assert settled.micro_batch == max(fitting)
    assert settle_micro_batch(job, PIPELINE) == PIPELINE


def test_where_nothing_fits_the_smallest_micro_batch_is_left(make_job):
    job = make_job("llama3-8b", cluster={"memory_bytes": 10**8})
    assert settle_micro_batch(job, Layout(mode="given", dp_replicate=2)).micro_batch == 1


# Bytes


def test_bytes_of_tensor_parallelism_by_hand(make_job):
    """Two all-reduces a layer and direction, of micro-batch x sequence x width x 2 bytes."""
    job = make_job("dense", train={"global_batch": 8})
    layout = Layout(mode="given", tp=2, micro_batch=2)
    (row,) = list_traffic(Workload.of(job), layout)
    assert (row.axis, row.op, row.ranks, row.tier) == ("tp", "all_reduce", 2, "node")
    assert row.calls == 4 * 6 * 4
    assert row.bytes == row.calls * 2 * 64 * 256 * 2


def test_bytes_of_zero_3_by_hand(make_job):
    """Weights are gathered twice and gradients scattered once in every micro-batch."""
    job = make_job("dense", train={"global_batch": 8})
    layout = Layout(mode="given", dp_shard=4, zero=3, micro_batch=1)
    rows = {row.op: row for row in list_traffic(Workload.of(job), layout)}
    count = count_parameters(job.model)
    assert rows["all_gather"].bytes == pytest.approx(2 * 2 * 2 * count, rel=0.01)
    assert rows["reduce_scatter"].bytes == pytest.approx(2 * 4 * count, rel=0.01)


def test_a_group_reaches_as_far_as_its_last_member(make_job):
    cluster = make_job("dense", cluster={"nodes": 8, "nodes_per_rack": 2}).cluster
    assert tier_of(cluster, 8, 1) == "node"
    assert tier_of(cluster, 2, 8) == "rack"
    assert tier_of(cluster, 16, 1) == "rack"
    assert tier_of(cluster, 8, 8) == "spine"


def test_one_device_moves_nothing(make_job):
    assert list_traffic(Workload.of(make_job("dense")), Layout(mode="given", micro_batch=1)) == []


def test_bytes_are_summed_by_axis_and_tier(make_job):
    rows = list_traffic(Workload.of(make_job("dense", **TABLES)), PIPELINE)
    sums = bytes_by_axis(rows)
    assert sum(sums.values()) == sum(row.bytes for row in rows)
    assert {axis for axis, _ in sums} == {"tp", "pp", "dp_shard"}


# Neighbours


@pytest.mark.parametrize("kind", ["llama3-8b", "mixtral-8x7b"])
def test_neighbours_are_legal_and_differ_in_one_thing(make_job, kind):
    job = make_job(kind, **TABLES)
    (best,) = best_of(job)
    near = list_neighbours(job, best.layout)
    assert len(near) > 8
    for words, layouts in near:
        for layout in layouts:
            assert find_problems(with_layout(job, layout), to_run=False) == [], words
            assert layout != best.layout
            assert layout.world_size == best.layout.world_size


def test_every_neighbour_loses_for_a_reason_with_a_number(make_job):
    job = make_job("llama3-8b", **TABLES)
    (best,) = best_of(job)
    sentences = explain_neighbours(best)
    for sentence in sentences:
        assert re.search(r": .*\d", sentence), sentence
        assert re.search(r" over$|slower|memory|faster", sentence), sentence
    assert any(sentence.startswith("tp=2 instead of 1") for sentence in sentences)


def test_memory_that_is_missing_is_said_in_bytes(make_job):
    job = make_job("llama3-8b", **TABLES)
    layouts = [PIPELINE, Layout(mode="given", dp_replicate=16, micro_batch=1)]
    fits, large = predict_layouts(job, layouts)
    assert not large.fits
    over = large.peak_bytes - job.cluster.memory_bytes
    assert compare(fits, large) == f"{over / 1e9:.3g} GB over"


def test_the_part_that_grew_is_named(make_job):
    job = make_job("llama3-8b", **TABLES)
    few = dataclasses.replace(PIPELINE, micro_batch=8)
    many, waits = predict_layouts(job, [PIPELINE, few])
    assert re.search(r"% slower: .* more bubble", compare(many, waits))


# The nearest legal layout


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        (Layout(mode="given", tp=3, micro_batch=1), {"tp": 4, "pp": 1, "dp_shard": 1}),
        (Layout(mode="given", dp_replicate=2, tp=6, micro_batch=1), {"dp_replicate": 2, "tp": 8}),
        (Layout(mode="given", dp_shard=4, zero=0, micro_batch=1), {"dp_shard": 4}),
        (Layout(mode="given", pp=64, micro_batch=1), {"pp": 16}),
    ],
)
def test_the_nearest_layout_is_legal_and_close(make_job, asked, nearest):
    job = make_job("llama3-8b", **TABLES)
    assert find_problems(with_layout(job, asked), to_run=False) != []
    found = find_nearest(job, asked)
    assert found is not None
    assert find_problems(found.job, to_run=False) == []
    assert {key: getattr(found.layout, key) for key in nearest} == nearest


def test_no_legal_layout_is_nearer_than_the_nearest(make_job):
    job = make_job("dense")
    asked = Layout(mode="given", tp=3, dp_shard=2, zero=1, micro_batch=2)
    found = find_nearest(job, asked)
    away = float(distance(Grid.of([found.layout]), asked)[0])
    for world in (8, 4, 2, 1):
        for chunk in Space(job, world).chunks():
            assert away <= distance(chunk.grow(), asked).min() + 1e-9


def test_a_legal_layout_is_its_own_nearest(make_job):
    job = make_job("llama3-8b", **TABLES)
    assert find_nearest(job, PIPELINE).layout == PIPELINE


def test_stages_that_were_not_asked_for_do_not_count_against_interleaving(make_job):
    """`schedule = interleaved` without stages is illegal; the nearest legal layout interleaves."""
    job = make_job("llama3-8b", **TABLES)
    asked = Layout(mode="given", pp=4, tp=2, schedule="interleaved", micro_batch=1)
    assert find_nearest(job, asked).layout.schedule == "interleaved"


def test_the_nearest_layout_that_fits_does(make_job):
    job = make_job("llama3-8b", **TABLES)
    asked = Layout(mode="given", tp=3)
    nearest, fitting = find_nearest(job, asked), find_nearest(job, asked, fitting=True)
    assert fitting.fits
    apart = [float(distance(Grid.of([found.layout]), asked)[0]) for found in (nearest, fitting)]
    assert apart[0] <= apart[1]


# Words


def test_a_layout_can_be_asked_for_with_the_overrides_that_are_shown(make_job):
    job = make_job("llama3-8b", **TABLES)
    for prediction in best_of(job, 5):
        tree = job_tree(dataclasses.replace(job, layout=Layout()))
        tree.pop("layout")
        for text in layout_overrides(prediction.layout).split():
            assert apply_override(tree, text) is None
        assert build_job(tree, to_run=False).layout == prediction.layout


def test_one_device_has_a_name():
    assert layout_words(Layout(mode="given", micro_batch=4)) == "one device micro_batch=4"
    assert (
        layout_overrides(Layout(mode="given", micro_batch=4)) == "layout.dp_replicate=1 layout.micro_batch=4"
    )


# What would make it fit


def test_a_remedy_that_is_named_makes_the_layout_fit(make_job):
    job = make_job(
        "llama3-8b", cluster={"devices_per_node": 8}, data={"seq_len": 8192}, train={"global_batch": 64}
    )
    layout = Layout(mode="given", tp=8, micro_batch=16)
    (before,) = predict_layouts(job, [layout])
    assert not before.fits
    remedies = remedies_for_layout(job, layout)
    assert remedies
    for remedy in remedies:
        key, value = (
            re.match(r"Use layout\.(\w+)=(\w+)", remedy).groups() if "layout." in remedy else ("", "")
        )
        if key in ("micro_batch", "recompute", "offload"):
            changed = dataclasses.replace(layout, **{key: int(value) if value.isdigit() else value})
            assert predict_layouts(job, [changed])[0].fits, remedy


def test_more_nodes_and_freed_keys_are_tried_by_the_planner(make_job):
    job = make_job("llama3-8b", cluster={"memory_bytes": 6 * 10**9, "devices_per_node": 8})
    pins = {"micro_batch": 8, "offload": "none"}
    assert find_layouts(job, pins, 1).best is None
    remedies = remedies_for_search(job, pins)
    assert any("to the planner" in remedy or "cluster.nodes=" in remedy for remedy in remedies)
    assert all(re.search(r"B a device, .*s a step", remedy) for remedy in remedies)


# The plan file


def test_an_estimated_plan_survives_its_file_and_says_that_it_is_not_exact(make_job, tmp_path):
    (best,) = predict_layouts(make_job("llama3-8b", **TABLES), [PIPELINE])
    plan = estimated_plan(best, ["because"])
    write_plan(plan, tmp_path / "plan.toml")
    assert "exact = false" in (tmp_path / "plan.toml").read_text()
    again = read_plan(tmp_path / "plan.toml", to_run=False)
    assert again == plan
    assert not again.exact
    assert again.world_size == 16
