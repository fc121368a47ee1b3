"""Closed forms of the memory bound, held at or below walked schedules."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.plan.estimate.grid import SCHEDULES, Grid
from meshwright.plan.search.memory_bound import count_pending
from meshwright.schedule.pipeline.actions import Kind
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.spec.layout import Layout

STAGES = {"zb-h1": 1, "zbv": 2, "dualpipe-v": 2}


def most_pending(schedule, rank):
    """Micro-batches, summed over a rank's stages, between their input and their weight gradients."""
    pending = most = 0
    for action in schedule.ranks[rank]:
        pending += {Kind.BACKWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
        most = max(most, pending)
    return most


def counted(name, pp, micro_batches, rank):
    layout = Layout("given", pp=pp, schedule=name, virtual_stages=STAGES.get(name, 1), micro_batch=1)
    return float(count_pending(Grid.of([layout]), np.array([rank]), np.array([micro_batches]))[0])


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("pp", range(2, 9))
def test_pending_weight_gradients_are_at_most_those_of_the_walk(name, pp):
    """On every pp rank, with few micro-batches, as many as ranks, and many."""
    least = 2 * pp if name == "dualpipe-v" else 1
    for micro_batches in sorted({least, *range(least, 3 * pp + 4), 5 * pp, 8 * pp + 1}):
        schedule = build_schedule(name, pp, micro_batches, STAGES[name])
        for rank in range(pp):
            walked = most_pending(schedule, rank)
            assert counted(name, pp, micro_batches, rank) <= walked, (micro_batches, rank)


@pytest.mark.parametrize("name", STAGES)
def test_on_the_last_rank_the_count_is_worth_having(name):
    """It is at least half of the walk's where micro-batches are many, and not zero."""
    for pp in (2, 4, 8):
        walked = most_pending(build_schedule(name, pp, 4 * pp, STAGES[name]), pp - 1)
        assert 0.5 * walked <= counted(name, pp, 4 * pp, pp - 1) <= walked


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in STAGES])
def test_schedules_that_do_not_split_the_backward_pass_have_none(name):
    assert counted(name, 4, 8, 3) == 0
