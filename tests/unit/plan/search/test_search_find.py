"""The search finds what pricing everything finds, and counts what it did."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.search.floors import products_s, schedules_floor_s
from meshwright.plan.search.enumerate import Space, world_sizes
from meshwright.plan.search.find import complexity, dominated, find_layouts, objective
from meshwright.plan.time.engine import estimate_step

KINDS = ["dense", "experts", "latent"]
LARGE = {
    "llama3-8b": {"cluster": {"nodes": 2}, "train": {"global_batch": 64}, "data": {"seq_len": 2048}},
    "mixtral-8x7b": {
        "cluster": {"preset": "h200-sxm", "devices_per_node": 4, "nodes": 2},
        "train": {"global_batch": 32},
        "data": {"seq_len": 2048},
    },
}
"""Spaces where much does not fit."""


def price_everything(job, by):
    """Scores of all layouts that fit, without any bound, best first."""
    workload = Workload.of(job)
    scores, steps, count = [], [], 0
    offloads = ("none", "optimizer", "all") if by == "memory" else ("none",)
    for world in world_sizes(job):
        for chunk in Space(job, world, offloads=offloads).chunks():
            grid = chunk.grow()
            memory, step = estimate_memory(workload, grid), estimate_step(workload, grid)
            fits = memory.fits(workload)
            scores.append(objective(by, grid, step.step_s, memory.peak_bytes)[fits])
            steps.append(step.step_s[fits])
            count += len(grid)
    return np.sort(np.concatenate(scores)), count


@pytest.mark.parametrize("by", ["time", "cost", "memory"])
@pytest.mark.parametrize("kind", [*KINDS, *LARGE])
def test_the_best_are_those_of_pricing_everything(make_job, kind, by):
    job = make_job(kind, **LARGE.get(kind, {}))
    found = find_layouts(job, {}, top=20, by=by)
    expected, count = price_everything(job, by)
    assert found.best is not None
    best = objective(by, found.best.grid, found.best.step_s, found.best.peak_bytes)
    assert best == pytest.approx(expected[:20], rel=1e-8)
    assert list(best) == sorted(best) or best == pytest.approx(np.sort(best), rel=1e-8)
    assert found.evaluated + found.pruned == count, "each layout is priced or ruled out"
    assert found.fit <= found.evaluated
    assert found.pruned > 0 or by != "time" or kind in KINDS


@pytest.mark.parametrize("kind", [*KINDS, "llama3-70b", "deepseek-v3", "gpt3-175b", "gpt-oss-120b"])
def test_no_step_is_faster_than_its_bounds(make_job, kind):
    job = make_job(kind, cluster={"nodes": 8}, data={"seq_len": 2048}, train={"global_batch": 64})
    workload = Workload.of(job)
    for number, chunk in enumerate(Space(job, 64).chunks(1 << 14)):
        grid, rows = chunk.grow(), np.repeat(np.arange(len(chunk.sizes)), chunk.sizes)
        step_s = estimate_step(workload, grid).step_s
        plain = estimate_step(workload, chunk.least())
        assert (schedules_floor_s(workload, plain, grid, rows) <= step_s * (1 + 1e-9)).all()
        assert (products_s(workload, 64) <= step_s * (1 + 1e-9)).all()
        if number == 12:
            break


@pytest.mark.parametrize("kind", [*KINDS, "llama3-70b", "deepseek-v3", "llama3-405b"])
def test_dominated_schedules_need_no_less_memory_than_1f1b(make_job, kind):
    """What the memory bound rests on."""
    job = make_job(kind, cluster={"nodes": 4}, data={"seq_len": 2048}, train={"global_batch": 64})
    workload = Workload.of(job)
    seen = 0
    for number, chunk in enumerate(Space(job, 32).chunks(1 << 14)):
        grid = chunk.grow()
        least = np.repeat(estimate_memory(workload, chunk.least()).peak_bytes, chunk.sizes)
        each = estimate_memory(workload, grid).peak_bytes
        held = dominated(job.model.num_layers, grid)
        assert (each[held] >= least[held] * (1 - 1e-9)).all()
        seen += int((held & (grid.schedule != 1)).sum())
        if number == 12:
            break
    assert seen > 100, "schedules other than 1F1B were among them"


@pytest.mark.parametrize("runtime", ["megatron-lm", "deepspeed-zero"])
def test_the_counts_hold_for_every_reach(make_job, runtime):
    tables = {**LARGE["llama3-8b"], "train": {"global_batch": 64, "runtime": runtime}}
    job = make_job("llama3-8b", **tables)
    found = find_layouts(job, {}, 20)
    expected, count = price_everything(job, "time")
    assert found.evaluated + found.pruned == count
    assert found.best.step_s == pytest.approx(expected[:20], rel=1e-8)


@pytest.mark.parametrize("pins", [{"schedule": "zbv"}, {"virtual_stages": 2}, {"schedule": "1f1b"}], ids=str)
def test_a_given_schedule_is_the_only_one_that_is_counted_and_kept(make_job, pins):
    job = make_job("llama3-8b", **LARGE["llama3-8b"])
    found = find_layouts(job, pins, 20)
    total = sum(len(Space(job, world, pins)) for world in world_sizes(job))
    assert found.evaluated + found.pruned == total
    kept = [found.best.grid.layout(n) for n in range(len(found.best))]
    assert all(getattr(layout, key) == value for layout in kept for key, value in pins.items())


def test_offloading_is_tried_only_where_nothing_else_fits(make_job):
    job = make_job("llama3-8b", cluster={"devices_per_node": 1}, train={"global_batch": 4})
    room = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, memory_bytes=10**12))
    assert not find_layouts(room, {}, 5).best.grid.offload.any()
    found = find_layouts(job, {}, 5)
    assert found.best is not None
    assert found.best.grid.offload.all()
    assert find_layouts(job, {"offload": "none"}, 5).best is None


def test_nothing_fits_leaves_the_layout_that_needs_least(make_job):
    job = make_job("llama3-8b", cluster={"memory_bytes": 10**9, "devices_per_node": 2})
    found = find_layouts(job, {}, 5)
    assert (found.best, found.fit) == (None, 0)
    workload = Workload.of(job)
    needs = [
        estimate_memory(workload, chunk.grow()).peak_bytes.min()
        for world in (2, 1)
        for chunk in Space(job, world, offloads=("none", "optimizer", "all")).chunks()
    ]
    assert found.least is not None
    assert estimate_memory(workload, found.least).peak_bytes[0] == pytest.approx(min(needs))


def test_progress_ends_at_the_total(make_job):
    told = []
    find_layouts(make_job("dense"), {}, 3, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_ties_go_to_the_simpler_layout(make_job):
    """Two layouts that differ only in a setting without effect on time: the plain one comes first."""
    job = make_job("dense")
    found = find_layouts(job, {}, 50)
    best = found.best
    digits = np.array([float(f"{value:.8e}") for value in best.step_s])
    simple = complexity(best.grid)
    for place in range(len(digits) - 1):
        if best.step_s[place] == best.step_s[place + 1]:
            assert simple[place] <= simple[place + 1] + 1e-12
    assert (np.diff(digits) >= 0).all()


def test_simplicity_prefers_fewer_axes_and_plain_settings(make_job):
    from meshwright.plan.estimate.grid import Grid
    from meshwright.spec.layout import Layout

    plain = Layout(dp_replicate=8, micro_batch=1)
    ordered = [
        plain,
        Layout(dp_shard=8, zero=1, micro_batch=1),
        Layout(dp_shard=8, zero=3, micro_batch=1),
        Layout(tp=8, micro_batch=1),
        Layout(pp=8, micro_batch=1),
        Layout(pp=8, schedule="zb-h1", micro_batch=1),
        Layout(pp=8, schedule="interleaved", virtual_stages=2, micro_batch=1),
    ]
    found = list(complexity(Grid.of(ordered)))
    assert found == sorted(found)
    assert len(set(found)) == len(found)
