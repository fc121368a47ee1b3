"""The search: the shortlist equals exhaustive pricing, and the best layouts are predicted exactly."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.fit import usable_bytes
from meshwright.plan.predict import predict
from meshwright.plan.search.failure import suggest_changes
from meshwright.plan.search.find import (
    SHORTLIST,
    SIMPLICITY_MARGIN,
    RankedLayouts,
    complexity,
    find_layouts,
    order_best,
    rank_values,
    score,
)
from meshwright.plan.search.memory_bound import EndCosts, PeakBound
from meshwright.plan.search.space import LayoutSpace, world_sizes
from meshwright.plan.search.time_bound import gemm_floor_s, schedule_floor_s
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.step import StepTime
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout

KINDS = ["dense", "experts", "latent"]
LARGE = {
    "llama3-8b": {"cluster": {"nodes": 2}, "train": {"global_batch": 64}, "data": {"seq_len": 2048}},
    "mixtral-8x7b": {
        "cluster": {"preset": "h200-sxm", "devices_per_node": 4, "nodes": 2},
        "train": {"global_batch": 32},
        "data": {"seq_len": 2048},
    },
}
"""Jobs for which many layouts do not fit."""


@pytest.fixture(autouse=True)
def unhurried_suggestions(monkeypatch):
    """Suggestions do not depend on how busy the machine is."""
    monkeypatch.setattr("meshwright.plan.search.failure.SUGGEST_S", 60.0)
    monkeypatch.setattr("meshwright.plan.search.failure.TRY_S", 20.0)


def price_everything(job, by):
    """Sorted scores of all legal layouts within the memory bounds, and the size of the space."""
    workload, bound = Workload.of(job), PeakBound(job)
    scores, count = [], 0
    offloads = ("none", "optimizer", "all") if by == "memory" else ("none",)
    for world in world_sizes(job):
        for chunk in LayoutSpace(job, world, offloads=offloads).chunks():
            grid = chunk.expand_schedules()
            step = estimate_step(workload, grid)
            needed = bound.needed_bytes(grid, EndCosts.of(step))
            fits = needed <= usable_bytes(job.cluster)
            fits &= bound.cpu_bytes(grid) <= (job.cluster.host_memory_bytes or np.inf)
            runs = np.array([not find_problems(with_layout(job, grid.layout(n))) for n in range(len(grid))])
            kept = np.flatnonzero(fits & runs)
            scores.append(rank_values(by, RankedLayouts(grid.take(kept), step.step_s[kept], needed[kept])))
            count += len(grid)
    return np.sort(np.concatenate(scores)), count


@pytest.mark.parametrize("by", ["time", "cost", "memory"])
@pytest.mark.parametrize(
    "kind", ["dense", "experts", *(pytest.param(k, marks=pytest.mark.slow) for k in LARGE)]
)
def test_shortlist_equals_exhaustive_pricing(make_decoder_job, kind, by):
    """No bound of time or memory prunes a layout of the shortlist. Every layout is counted once."""
    job = make_decoder_job(kind, **LARGE.get(kind, {"cluster": {"devices_per_node": 4}}))
    found = find_layouts(job, {"offload": "none"} if by != "memory" else {}, top=4, objective=by)
    expected, count = price_everything(job, by)
    kept = rank_values(by, found.shortlist)
    assert len(kept) == min(SHORTLIST, len(expected))
    assert kept == pytest.approx(expected[: len(kept)], rel=1e-8)
    assert found.evaluated + found.pruned == count, "each layout is priced or pruned"
    assert found.may_fit <= found.evaluated
    assert len(found.best) <= 4 <= found.checked


@pytest.mark.parametrize("kind", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
def test_recommended_layout_is_the_best_of_all_predictions(make_decoder_job, kind):
    """It may be slower by the simplicity margin and the error of the closed-form bubble."""
    job = make_decoder_job(kind, cluster={"devices_per_node": 4})
    steps = []
    for world in world_sizes(job):
        for chunk in LayoutSpace(job, world).chunks():
            grid = chunk.expand_schedules()
            for place in range(0, len(grid), 7):
                prediction = predict(job, grid.layout(place))
                steps += [prediction.step_s] if prediction.fits and prediction.exact else []
    assert len(steps) > 50
    found = find_layouts(job, {})
    assert found.best[0].step_s <= min(steps) * (1 + SIMPLICITY_MARGIN["cuda"] + 0.02)


@pytest.mark.parametrize("by", ["time", "cost", "memory"])
def test_best_layouts_are_exact_fit_and_sorted(make_decoder_job, by):
    found = find_layouts(make_decoder_job("llama3-8b", **LARGE["llama3-8b"]), {}, 20, by)
    assert len(found.best) == 20
    assert all(p.exact and p.fits for p in found.best)
    first, *rest = [score(by, p) for p in found.best]
    assert rest == sorted(rest)
    assert first <= rest[0] * (1 + (0 if by == "memory" else SIMPLICITY_MARGIN["cuda"]))
    assert {p.layout for p in found.best} == {predict(found.job, p.layout).layout for p in found.best}


@pytest.mark.parametrize("kind", [*KINDS, "llama3-70b", "deepseek-v3", "gpt3-175b", "gpt-oss-120b"])
def test_time_bounds_never_exceed_the_step_time(make_decoder_job, kind):
    job = make_decoder_job(kind, cluster={"nodes": 8}, data={"seq_len": 2048}, train={"global_batch": 64})
    workload = Workload.of(job)
    for number, chunk in enumerate(LayoutSpace(job, 64).chunks(1 << 14)):
        grid, rows = chunk.expand_schedules(), np.repeat(np.arange(len(chunk.sizes)), chunk.sizes)
        step_s = estimate_step(workload, grid).step_s
        plain = estimate_step(workload, chunk.with_1f1b())
        assert (schedule_floor_s(workload, plain, grid, rows) <= step_s * (1 + 1e-9)).all()
        assert (gemm_floor_s(workload, 64) <= step_s * (1 + 1e-9)).all()
        if number == 12:
            break


@pytest.mark.parametrize("runtime", ["megatron-lm", "deepspeed-zero"])
def test_counts_and_fits_hold_for_other_runtimes(make_decoder_job, runtime):
    """Other runtimes have no exact ledger. Their memory is the estimate."""
    tables = {**LARGE["llama3-8b"], "train": {"global_batch": 64, "runtime": runtime}}
    job = make_decoder_job("llama3-8b", **tables)
    found = find_layouts(job, {"offload": "none"}, 20)
    assert found.evaluated + found.pruned == sum(len(LayoutSpace(job, world)) for world in world_sizes(job))
    assert found.best
    assert not any(p.exact for p in found.best)
    assert all(p.fits for p in found.best)


@pytest.mark.parametrize("pins", [{"schedule": "zbv"}, {"virtual_stages": 2}, {"schedule": "1f1b"}], ids=str)
def test_pinned_schedule_is_the_only_one_searched(make_decoder_job, pins):
    job = make_decoder_job("llama3-8b", **LARGE["llama3-8b"])
    found = find_layouts(job, {**pins, "offload": "none"}, 20)
    assert found.evaluated + found.pruned == sum(
        len(LayoutSpace(job, world, pins)) for world in world_sizes(job)
    )
    assert found.best
    assert all(getattr(p.layout, key) == value for p in found.best for key, value in pins.items())


def test_offloading_is_searched_only_if_nothing_else_fits(make_decoder_job):
    """Triton blocks keep 16-bit weight copies and do not fit even so: eager blocks are suggested."""
    one = {"devices_per_node": 1, "memory_bytes": 90 * 10**9}
    job = make_decoder_job("llama3-8b", cluster=one, train={"global_batch": 4, "block_backend": "eager"})
    room = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, memory_bytes=10**12))
    assert {p.layout.offload for p in find_layouts(room, {}, 5).best} == {"none"}
    found = find_layouts(job, {}, 5)
    assert found.best
    assert "none" not in {p.layout.offload for p in found.best}
    assert find_layouts(job, {"offload": "none"}, 5).best == []
    default = dataclasses.replace(job, train=dataclasses.replace(job.train, block_backend=None))
    assert find_layouts(default, {}, 5).best == []
    assert any(text.startswith("Use train.block_backend=eager") for text in suggest_changes(default, {}))


def test_search_without_a_fit_returns_the_closest_layout(make_decoder_job):
    """It does not fit, and needs less than plain FSDP, tensor parallel and pipeline layouts."""
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": 2 * 10**9, "devices_per_node": 2})
    found = find_layouts(job, {}, 5)
    assert found.best == []
    assert found.closest is not None
    assert not found.closest.fits
    for layout in (Layout("given", dp_shard=2, zero=3), Layout("given", tp=2), Layout("given", pp=2)):
        assert found.closest.needed_bytes < predict(job, layout).needed_bytes


def test_progress_ends_at_the_total(make_decoder_job):
    reported = []
    find_layouts(
        make_decoder_job("dense"), {}, 3, progress=lambda done, total: reported.append((done, total))
    )
    assert reported[-1][0] == reported[-1][1]
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)


def test_search_stops_at_its_time_budget(make_decoder_job):
    """It counts the layouts that it did not see. A search within its budget sees all."""
    job = make_decoder_job(
        "llama3-70b", cluster={"nodes": 16}, train={"global_batch": 1024}, data={"seq_len": 4096}
    )
    early = find_layouts(job, {}, 64, budget_s=0.001)
    assert early.stopped_early
    assert early.counts()["stopped_early"] is True
    assert early.unseen > 0
    assert len(early.best) < 64
    small = find_layouts(make_decoder_job("dense"), {}, 3)
    assert not small.stopped_early
    assert small.unseen == 0


# Preference for simple layouts


def timed(job, layout, step_s):
    """A prediction with this step time."""
    return dataclasses.replace(predict(job, layout), time=StepTime({"compute": step_s}))


SIMPLE = Layout("given", dp_replicate=8, micro_batch=1)
OTHER = Layout("given", dp_shard=4, tp=2, zero=1, sequence_parallel=True, micro_batch=1)


@pytest.mark.parametrize(
    ("slower", "first"), [(1.0, SIMPLE), (1.009, SIMPLE), (1.011, OTHER)], ids=["equal", "0.9%", "1.1%"]
)
@pytest.mark.parametrize("by", ["time", "cost"])
def test_simplest_layout_within_1_percent_is_recommended(make_decoder_job, by, slower, first):
    """The margin is that of GPUs. The other layouts stay sorted by score."""
    job = make_decoder_job("dense")
    worst = timed(job, Layout("given", dp_shard=8, zero=1, micro_batch=1), 3.0)
    found = [worst, timed(job, OTHER, 1.0), timed(job, SIMPLE, slower)]
    ordered = order_best(by, found)
    assert ordered[0].layout.dp_replicate == first.dp_replicate
    assert len(ordered) == 3
    assert ordered[-1] is worst


def test_simplicity_margin_on_cpus_is_10_percent(make_decoder_job):
    job = make_decoder_job("dense", cluster={"preset": "local", "device": "cpu", "devices_per_node": 8})
    near, far = (order_best("time", [timed(job, OTHER, 1.0), timed(job, SIMPLE, t)]) for t in (1.09, 1.11))
    assert near[0].layout.dp_replicate == 8
    assert far[0].layout.tp == 2


def test_objective_memory_ignores_simplicity(make_decoder_job):
    job = make_decoder_job("dense")
    found = [predict(job, layout) for layout in (SIMPLE, OTHER)]
    assert order_best("memory", found)[0].needed_bytes == min(p.needed_bytes for p in found)
    assert order_best("memory", []) == []


def test_equal_step_times_are_sorted_by_simplicity(make_decoder_job):
    """Layouts of the shortlist whose steps are equal come in order of simplicity."""
    found = find_layouts(make_decoder_job("dense"), {}, 4).shortlist
    digits = np.array([float(f"{value:.8e}") for value in found.step_s])
    simple = complexity(found.grid)
    equal = np.flatnonzero(found.step_s[:-1] == found.step_s[1:])
    assert len(equal) > 10
    assert (simple[equal] <= simple[equal + 1] + 1e-12).all()
    assert (np.diff(digits) >= 0).all()


def test_complexity_grows_with_axes_and_settings():
    ordered = [
        Layout(dp_replicate=8, micro_batch=1),
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


def test_a_busy_machine_does_not_change_the_result(make_decoder_job, monkeypatch):
    """The budget is CPU time: a wall clock that runs a thousand times as fast finds the same layouts."""
    job = make_decoder_job("llama3-8b", **LARGE["llama3-8b"])
    calm = find_layouts(job, {}, 8)
    fast = SimpleNamespace(perf_counter=lambda: 1000 * time.perf_counter(), process_time=time.process_time)
    monkeypatch.setattr("meshwright.plan.search.find.time", fast)
    busy = find_layouts(job, {}, 8)
    assert not busy.stopped_early
    assert [p.layout for p in busy.best] == [p.layout for p in calm.best]


def test_some_layouts_are_checked_whatever_the_budget(make_decoder_job):
    job = make_decoder_job("llama3-8b", **LARGE["llama3-8b"])
    assert find_layouts(job, {}, 64, budget_s=1e-9).best
