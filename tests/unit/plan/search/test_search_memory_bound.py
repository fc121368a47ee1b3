"""The memory bound of the search never exceeds the need of the exact ledger.

A bound that is too high would prune a layout that fits. The layouts are drawn, with a fixed seed, from the
whole space of the search, and only those that run are compared.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.predict import complete_layout, predict_memory
from meshwright.plan.search.memory_bound import EndCosts, PeakBound
from meshwright.plan.search.space import LayoutSpace
from meshwright.plan.time.engine import estimate_step
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.load import load_job
from meshwright.spec.numbers import divisors

MODELS = ("llama3.2-1b", "llama3-8b", "llama2-70b", "gpt3-175b", "mixtral-8x7b", "qwen3-30b-a3b")
CLUSTERS = ("h100-sxm", "a100-40g-sxm", "gb200-nvl72")
WORLDS = (1, 8, 16, 64)
DRAWN = 17
"""Layouts of each model on each cluster: 306 in all."""
MOST_TRIES = 400
SEED = 20240607
OFFLOADS = ("none", "optimizer", "all")
VARIANTS: tuple[tuple[str, ...], ...] = (
    ("train.precision=fp32",),
    ("train.block_backend=triton",),
    ("train.block_backend=triton", "train.grad_dtype=bf16", "train.block_backend=triton"),
    ("data.mask=document",),
    ("layout.accumulate=deferred",),
    ("layout.prefetch=2",),
    ("compression.kind=bf16",),
    ("train.optimizer=sgd",),
    ("train.optimizer=lion",),
    ("train.global_batch=7",),
    ("model.tied_embeddings=true",),
)
"""Settings with other lines or sizes in the ledger."""


def bound_bytes(job: Job, layout: Layout) -> float:
    """The memory bound of the rank with the largest need."""
    bound, grid = PeakBound(job), Grid.of([layout])
    return float(bound.needed_bytes(grid, EndCosts.of(estimate_step(bound.workload, grid)))[0])


def state_bound_bytes(job: Job, layout: Layout) -> float:
    """The bound of the state alone, which the search computes first."""
    return float(PeakBound(job).least_bytes(Grid.of([layout]))[0])


def needed_bytes(job: Job, layout: Layout) -> int:
    """The need of that rank in the exact ledger."""
    return predict_memory(with_layout(job, complete_layout(job, layout)), exact=True).need.needed_bytes


def draw_layouts(job: Job, drawn: random.Random, count: int) -> list[Layout]:
    """Draw different runnable layouts from the space of the search.

    The degrees of pp, tp and cp are drawn first, then one layout with these degrees. Otherwise nearly all
    layouts would be pipelines, which have the most schedules.
    """
    found: list[Layout] = []
    for _ in range(MOST_TRIES):
        if len(found) == count:
            return found
        layout = _draw_one(job, drawn)
        if layout is not None and layout not in found and not find_problems(with_layout(job, layout)):
            found.append(layout)
    raise AssertionError(f"{len(found)} layouts of {count} in {MOST_TRIES} tries")


def _draw_one(job: Job, drawn: random.Random) -> Layout | None:
    """One legal layout, or None if the drawn degrees have none."""
    world, pins = drawn.choice(WORLDS), {}
    left = world
    for axis in drawn.sample(("pp", "tp", "cp"), 3):
        pins[axis] = drawn.choice(divisors(left))
        left //= pins[axis]
    pins |= {name: getattr(job.layout, name) for name in ("accumulate", "prefetch")}
    space = LayoutSpace(job, world, pins, OFFLOADS)
    if not len(space):
        return None
    chunk = drawn.choice(list(space.chunks(size=1 << 12)))
    row = np.array([drawn.randrange(len(chunk.columns["pp"]))])
    grown = chunk.expand_schedules(row)
    return grown.layout(drawn.randrange(len(grown))) if len(grown) else None


@functools.cache
def drawn_layouts(model: str, cluster: str) -> tuple[Job, tuple[Layout, ...]]:
    """The layouts of one model on one cluster."""
    job = load_job(model, on=f"64x8x{cluster}", to_run=False)
    drawn = random.Random(f"{SEED} {model} {cluster}")
    return job, tuple(draw_layouts(job, drawn, DRAWN))


def _all_drawn() -> Iterator[Layout]:
    for model in MODELS:
        for cluster in CLUSTERS:
            yield from drawn_layouts(model, cluster)[1]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_memory_bound_is_at_most_the_exact_need(model, cluster):
    """No layout of the sample is pruned although it fits."""
    job, layouts = drawn_layouts(model, cluster)
    pairs = [(layout, bound_bytes(job, layout), needed_bytes(job, layout)) for layout in layouts]
    high = [f"{layout}: bound {bound:.0f}, need {need}" for layout, bound, need in pairs if bound > need]
    assert not high, f"{len(high)} of {len(pairs)} bounds are too high:\n" + "\n".join(high)


@pytest.mark.parametrize("overrides", VARIANTS, ids=" ".join)
@pytest.mark.parametrize("model", ["llama3.2-1b", "mixtral-8x7b"])
def test_memory_bound_holds_with_other_settings(model, overrides):
    """The bound also holds for other precisions, masks, optimizers and kinds of accumulation."""
    job = load_job(model, overrides, "8x8xh100-sxm", to_run=False)
    layouts = draw_layouts(job, random.Random(f"{SEED} {model} {overrides}"), 8)
    high = [str(layout) for layout in layouts if bound_bytes(job, layout) > needed_bytes(job, layout)]
    assert not high, f"{len(high)} of {len(layouts)} bounds are too high:\n" + "\n".join(high)


@pytest.mark.parametrize("model", MODELS)
def test_state_bound_is_at_most_the_need_of_every_schedule(model):
    """A layout pruned by its state alone fits with no schedule."""
    job, layouts = drawn_layouts(model, "h100-sxm")
    assert all(state_bound_bytes(job, layout) <= needed_bytes(job, layout) for layout in layouts)


def test_memory_bound_is_at_least_half_of_the_need():
    """The bound is not trivially low. This is the median over the sample."""
    shares = []
    for model in MODELS:
        job, layouts = drawn_layouts(model, "h100-sxm")
        shares += [bound_bytes(job, layout) / needed_bytes(job, layout) for layout in layouts]
    assert 0.5 <= float(np.median(shares)) <= 1.0


def test_sampled_layouts_cover_every_axis_and_setting():
    """The sample has at least 300 layouts and every case that the ledger distinguishes."""
    layouts = list(_all_drawn())
    assert len(layouts) >= 300
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"):
        assert sum(getattr(layout, axis) > 1 for layout in layouts) >= 10, axis
    for name in ("zero", "recompute", "offload", "schedule", "context", "sequence_parallel"):
        assert len(Counter(getattr(layout, name) for layout in layouts)) > 1, name
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {layout.recompute for layout in layouts} == {"none", "selective", "full"}
    schedules = {layout.schedule for layout in layouts if layout.pp > 1}
    assert schedules >= {"1f1b", "interleaved", "zb-h1", "zbv"}
