"""The closed form of deferred weight gradients is at most that of the simulated schedule."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.search.memory_bound import count_pending
from meshwright.schedule.pipeline.actions import Kind
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.spec.layout import SCHEDULES, Layout

STAGES = {"zb-h1": 1, "zbv": 2, "dualpipe-v": 2}


def most_pending(schedule, rank):
    """The peak of deferred weight gradients on a rank, over all its stages."""
    pending = most = 0
    for action in schedule.ranks[rank]:
        pending += {Kind.BACKWARD: 1, Kind.WEIGHT: -1}.get(action.kind, 0)
        most = max(most, pending)
    return most


def closed_form_pending(name, pp, micro_batches, rank):
    """The closed form of the memory bound."""
    layout = Layout("given", pp=pp, schedule=name, virtual_stages=STAGES.get(name, 1), micro_batch=1)
    return float(count_pending(Grid.of([layout]), np.array([rank]), np.array([micro_batches]))[0])


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("pp", range(2, 9))
def test_closed_form_is_at_most_the_schedule(name, pp):
    """It holds on every pp rank, with few and many micro-batches."""
    least = 2 * pp if name == "dualpipe-v" else 1
    for micro_batches in sorted({least, *range(least, 3 * pp + 4), 5 * pp, 8 * pp + 1}):
        schedule = build_schedule(name, pp, micro_batches, STAGES[name])
        for rank in range(pp):
            walked = most_pending(schedule, rank)
            assert closed_form_pending(name, pp, micro_batches, rank) <= walked, (micro_batches, rank)


@pytest.mark.parametrize("name", STAGES)
def test_closed_form_on_the_last_rank_is_at_least_half(name):
    """This needs many micro-batches."""
    for pp in (2, 4, 8):
        walked = most_pending(build_schedule(name, pp, 4 * pp, STAGES[name]), pp - 1)
        assert 0.5 * walked <= closed_form_pending(name, pp, 4 * pp, pp - 1) <= walked


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in STAGES])
def test_schedules_without_split_backward_defer_nothing(name):
    assert closed_form_pending(name, 4, 8, 3) == 0
