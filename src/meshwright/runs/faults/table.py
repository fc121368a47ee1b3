"""The fault tests: number, name, pass criterion, faults from a seed, and how a trial is judged.

The numbers are those of the reliability tests that the issue tracker and ``docs/faults.md`` use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.elastic.faults.schedule import CALLS, Fault, call_wrongly, fail
from meshwright.runs.faults.job import PHASES, WORLD_SIZE
from meshwright.runs.faults.judges import Figure, is_settled, judge_kills, judge_wrong_call
from meshwright.runs.faults.trial import Trial

Schedule = list[Fault]
FIRST_STEP, LAST_STEP = 12, 40
"""Steps in which a single fault is injected: after the first snapshot."""


@dataclass(frozen=True)
class FaultTest:
    """One of the reliability tests."""

    number: int
    name: str
    criterion: str
    build: Callable[[random.Random, str], list[Schedule]]
    """The faults of each run, from a random generator and the layout's name."""
    judge: Callable[[Trial], list[Figure]]
    is_over: Callable[[Trial], bool] = is_settled
    seconds: float = 1.0
    """What one run takes besides its start and its steps."""
    ends_run: bool = False
    """Whether the fault ends the run: then there is nothing to compare with a fault-free run."""


def _kill_one_rank(seed: random.Random, layout: str) -> list[Schedule]:
    phases = [phase for phase in PHASES[layout] if phase not in ("forward", "update")]
    rank = seed.randrange(1, WORLD_SIZE)
    return [[fail(rank=rank, step=seed.randint(FIRST_STEP, LAST_STEP), during=seed.choice(phases))]]


def _kill_rank_0(seed: random.Random, layout: str) -> list[Schedule]:
    return [[fail(rank=0, step=seed.randint(FIRST_STEP, LAST_STEP), during=seed.choice(PHASES[layout]))]]


def _call_wrongly(seed: random.Random, _: str) -> list[Schedule]:
    return [
        [call_wrongly(rank=seed.randrange(WORLD_SIZE), step=seed.randint(4, FIRST_STEP), call=call)]
        for call in CALLS
    ]


TESTS = (
    FaultTest(
        1,
        "kill-rank",
        "kill -9 of one of 4 ranks: noticed <= 1 s, next step <= 10 s, same losses and parameters",
        _kill_one_rank,
        judge_kills,
    ),
    FaultTest(
        2,
        "kill-rank-0",
        "kill -9 of rank 0: noticed <= 1 s, next step <= 10 s, same losses and parameters",
        _kill_rank_0,
        judge_kills,
    ),
    FaultTest(
        9,
        "wrong-call",
        "another op, another shape, a skipped call: rank, op and source line named <= 5 s",
        _call_wrongly,
        judge_wrong_call,
        is_over=lambda _: False,
        seconds=6.0,
        ends_run=True,
    ),
)
