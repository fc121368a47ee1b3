"""Layers per stage by cost, the slowest rank in closed form, and the simulated schedule."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from meshwright.layout.pipeline_schedules import schedule_of, stage_pp_ranks
from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.predict import complete_layout
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.pipeline import plan_pipeline, walk_pipeline
from meshwright.plan.time.stage_layers import GRAIN, assign_layers, rank_costs, slowest_load, stage_costs
from meshwright.plan.time.stages import PartCosts, part_costs, split_layers, stage_times
from meshwright.plan.time.step import predict_step
from meshwright.schedule.pipeline.actions import loop_ranks, v_shaped_ranks
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import Layout

SHAPES = [(pp, "1f1b", 1) for pp in (2, 3, 8, 64)]
SHAPES += [(4, "interleaved", 2), (8, "interleaved", 3), (4, "zbv", 2)]


def homes_of(pp, schedule, stages):
    return v_shaped_ranks(pp) if schedule == "zbv" else loop_ranks(pp, stages)


def test_layers_are_assigned_to_the_least_loaded_stages():
    """The head on the last stage costs two layers, the embedding on the first costs one."""
    assert assign_layers(16, (0, 1, 2, 3), 0.0, 0.0) == (4, 4, 4, 4)
    assert assign_layers(13, (0, 1, 2, 3), 1.0, 2.0) == (3, 4, 4, 2)
    assert assign_layers(17, (0, 1, 2, 3), 0.0, 0.0) == (4, 4, 4, 5), "the last of equal stages"
    assert assign_layers(4, (0, 1, 2, 3), 0.0, 50.0) == (1, 1, 1, 1), "at least one layer"
    assert assign_layers(8, (0, 1, 1, 0), 1.0, 3.0) == (1, 3, 3, 1)


def test_costs_are_rounded_so_that_few_splits_exist():
    homes = loop_ranks(8, 1)
    for cost in np.linspace(0, 4, 33):
        rounded = round(cost / GRAIN) * GRAIN
        assert assign_layers(80, homes, 0.2, cost) == assign_layers(80, homes, 0.25, rounded)


def test_assigning_126_layers_to_64_stages_takes_less_than_2_ms():
    homes, heads = loop_ranks(64, 1), iter(np.arange(1, 9))
    taken = []
    for head in heads:
        began = time.perf_counter()
        assign_layers(126, homes, 0.5, head + 0.125)
        taken.append(time.perf_counter() - began)
    assert min(taken) < 2e-3


@pytest.mark.parametrize(("pp", "schedule", "stages"), SHAPES)
def test_the_closed_form_has_the_slowest_rank_of_the_assigned_layers(pp, schedule, stages):
    generator, homes = np.random.default_rng(pp), homes_of(pp, schedule, stages)
    layout = Layout(mode="given", pp=pp, schedule=schedule, virtual_stages=stages, micro_batch=1)
    embedding, head = (generator.integers(0, most, 30) * GRAIN for most in (20, 80))
    for layers in (max(64, len(homes)), 80, 126):
        found = slowest_load(Grid.of([layout] * 30), layers, embedding, head)
        for first, last, load in zip(embedding, head, found, strict=True):
            assigned = assign_layers(layers, homes, first, last)
            assert sum(assigned) == layers
            assert load == pytest.approx(max(rank_costs(stage_costs(assigned, first, last), homes)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stages_are_balanced_by_the_costs_that_the_step_is_predicted_with(make_job, device):
    job = make_job(
        model={"num_layers": 12, "vocab_size": 8192},
        cluster={"device": device},
        layout={"pp": 4, "micro_batch": 1},
    )
    costs, layers = part_costs(job), split_layers(job)
    assert layers == assign_layers(12, stage_pp_ranks(job), costs.embedding_blocks, costs.head_blocks)
    step = estimate_step(Workload.of(job), Grid.of([job.layout]))
    assert costs == PartCosts.of(step, 0)
    times = stage_times(job, 8, step, 0)
    rows = np.array([times.forward_s, times.backward_input_s, times.backward_weight_s])
    assert rows.sum() == pytest.approx(4 * float(step.passes.total[0])), (
        "the stages sum to the average rank times four"
    )
    assert rows.sum(axis=0)[0] == pytest.approx(layers[0] * costs.block.total_s + costs.embedding.total_s)
    assert rows.sum(axis=0)[-1] == pytest.approx(layers[-1] * costs.block.total_s + costs.head.total_s)


def test_bubble_and_transfers_come_from_the_simulation(make_job):
    """The simulation without transfers gives the bubble. Transfers are the rest of the longer makespan."""
    job = make_job(
        model={"num_layers": 8},
        cluster={"preset": "local", "device": "cpu", "devices_per_node": 4},
        layout={"pp": 4, "micro_batch": 1},
    )
    job = dataclasses.replace(job, layout=complete_layout(job, job.layout))
    step = predict_step(job, 8)
    planned = step.pipeline
    assert planned is not None
    still = walk_schedule(schedule_of(job, 8), planned.stage_times, 0.0)
    assert max(still.work_s) == pytest.approx(planned.work_s)
    waits = step.parts["bubble"] + step.parts["pipeline transfers"]
    assert waits == pytest.approx(planned.makespan_s - planned.work_s)
    assert step.parts["bubble"] == pytest.approx(still.makespan_s - max(still.work_s), rel=0.2)
    _, walk = walk_pipeline(job, 8, planned)
    assert walk.makespan_s == pytest.approx(planned.makespan_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_transfers_on_the_critical_path_are_the_fill_and_the_drain(make_job, schedule):
    """With equal stages short transfers are exposed only there: at least pp - 1 in each direction."""
    job = make_job(
        model={"num_layers": 4},
        cluster={"preset": "local", "device": "cpu", "devices_per_node": 4},
        layout={"pp": 4, "micro_batch": 1, "schedule": schedule},
    )
    planned = plan_pipeline(job, 8, StageTimes([1.0] * 4, [1.0] * 4, [1.0] * 4), 0.01)
    assert planned is not None
    assert 0.05 < planned.exposed_send_s < 0.3
    assert planned.work_s == pytest.approx(24.0)
    assert planned.bubble_s + planned.exposed_send_s + planned.work_s == pytest.approx(planned.makespan_s)
    books = {"gpipe": 9.0, "1f1b": 9.0, "zb-h1": 3.0}[schedule]
    assert planned.bubble_s == pytest.approx(books, rel=0.05)


def test_schedule_too_large_to_simulate_uses_the_closed_form(make_job):
    layout = {"pp": 4, "micro_batch": 1}
    job = make_job(model={"num_layers": 4}, train={"global_batch": 2_000_000}, layout=layout)
    step = predict_step(job, 2_000_000)
    assert step.pipeline is None
    estimated = estimate_step(Workload.of(job), Grid.of([job.layout]))
    assert step.total_s == float(estimated.step_s[0])
