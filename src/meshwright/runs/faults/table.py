"""The fault tests: number, name, pass criterion, faults from a seed, and how a trial is evaluated.

The numbers are those of the project's list of 25 reliability tests (``docs/faults.md``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.elastic.faults.schedule import (
    CALLS,
    GRADIENTS,
    Fault,
    connect,
    corrupt_gradient,
    fail,
    kill_supervisor,
    preempt,
    shift_clock,
    slow,
    stop,
    stop_supervisor,
    wrong_collective,
)
from meshwright.runs.faults import criteria
from meshwright.runs.faults.criteria import Figure
from meshwright.runs.faults.job import PHASES, WORLD_SIZE
from meshwright.runs.faults.trial import Trial

Schedule = list[Fault]
FIRST_STEP, LAST_STEP = 12, 40
"""Steps in which a single fault is injected: after the first snapshot."""
LONG_S = 60.0
STOPS, STOP_S, STOP_GAP_STEPS = 10, 60.0, 15
KILL_GAP_S, KILL_SEEDS = 9.0, 3
SLOW_FACTOR, SLOW_S = 1.5, 60.0
COMPUTE_BOUND = ("data.seq_len=512",)
"""Settings for a slow rank, whose compute must be a good part of the step."""
CHAOS_KILLS, CHAOS_AT_ONCE, CHAOS_GAP_STEPS = 100, 0.2, (3, 9)
BAD_STEP_GAP = 8


@dataclass(frozen=True)
class FaultTest:
    """One of the reliability tests."""

    number: int
    name: str
    criterion: str
    build: Callable[[random.Random, str], list[Schedule]]
    """The faults of each run, from a random generator and the layout's name."""
    evaluate: Callable[[Trial], list[Figure]]
    is_over: Callable[[Trial], bool] = criteria.is_settled
    seconds: float = 1.0
    """What one run takes besides its start and its steps."""
    calm_s: float = 0.0
    """How long the fault-free run must be, where steps are counted by time."""
    ends_run: bool = False
    """Whether the fault ends the run."""
    changes_losses: bool = False
    """Whether the losses after the fault are others than without it."""
    overrides: tuple[str, ...] = ()
    """Overrides of the job."""

    alone: bool = False
    """Whether no fault-free run is needed: nothing fails, so there is nothing to recover."""

    @property
    def compares(self) -> bool:
        """Whether losses and checkpoints must be those of a fault-free run."""
        return not (self.ends_run or self.changes_losses or self.alone)

    @property
    def is_long(self) -> bool:
        """Whether it runs after the others of all layouts."""
        return self.seconds > LONG_S


def _kill_one_rank(seed: random.Random, layout: str) -> list[Schedule]:
    phases = [phase for phase in PHASES[layout] if phase not in ("forward", "update")]
    rank = seed.randrange(1, WORLD_SIZE)
    return [[fail(rank=rank, step=_choose_step(seed), during=seed.choice(phases))]]


def _kill_rank_0(seed: random.Random, layout: str) -> list[Schedule]:
    return [[fail(rank=0, step=_choose_step(seed), during=seed.choice(PHASES[layout]))]]


def _kill_supervisor(seed: random.Random, _: str) -> list[Schedule]:
    return [[kill_supervisor(step=_choose_step(seed), restart_after_s=5.0)]]


def _kill_all_the_time(seed: random.Random, _: str) -> list[Schedule]:
    schedules = []
    for _run in range(KILL_SEEDS):
        schedule, after_s = Schedule(), seed.expovariate(1 / KILL_GAP_S)
        while after_s < criteria.KILL_LOOP_S:
            schedule.append(fail(rank=seed.randrange(WORLD_SIZE), after_s=round(after_s, 2)))
            after_s += seed.expovariate(1 / KILL_GAP_S)
        schedules.append(schedule)
    return schedules


def _stop_ranks(seed: random.Random, layout: str) -> list[Schedule]:
    return [
        [
            stop(
                rank=seed.randrange(WORLD_SIZE),
                step=FIRST_STEP + number * STOP_GAP_STEPS,
                for_s=STOP_S,
                during=seed.choice(PHASES[layout]),
            )
            for number in range(STOPS)
        ]
    ]


def _stop_supervisor(seed: random.Random, _: str) -> list[Schedule]:
    return [[stop_supervisor(step=_choose_step(seed), for_s=20.0)]]


def _preempt(seed: random.Random, _: str) -> list[Schedule]:
    return [[preempt(step=_choose_step(seed), grace_s=criteria.PREEMPTED_S)]]


def _slow_rank(seed: random.Random, _: str) -> list[Schedule]:
    step = criteria.CLEAN_STEPS + 1
    return [[slow(rank=seed.randrange(WORLD_SIZE), step=step, factor=SLOW_FACTOR, for_s=SLOW_S)]]


def _wrong_collective(seed: random.Random, _: str) -> list[Schedule]:
    return [
        [wrong_collective(rank=seed.randrange(WORLD_SIZE), step=seed.randint(4, FIRST_STEP), call=call)]
        for call in CALLS
    ]


def _shift_clocks(seed: random.Random, _: str) -> list[Schedule]:
    """Behind, a jump ahead, and then a kill: the ranks join again with clocks that differ."""
    shifted, killed = seed.sample(range(1, WORLD_SIZE), 2)
    step = seed.randint(4, FIRST_STEP)
    return [
        [
            shift_clock(rank=shifted, step=step, by_s=-60.0),
            shift_clock(rank=shifted, step=step + 10, by_s=60.0),
            fail(rank=killed, step=step + 20),
        ]
    ]


def _corrupt_gradients(seed: random.Random, _: str) -> list[Schedule]:
    first = seed.randint(FIRST_STEP, FIRST_STEP + BAD_STEP_GAP)
    return [
        [
            corrupt_gradient(rank=seed.randrange(WORLD_SIZE), step=first + number * BAD_STEP_GAP, value=value)
            for number, value in enumerate(GRADIENTS)
        ]
    ]


def _kill_a_hundred(seed: random.Random, layout: str) -> list[Schedule]:
    """In any phase of a step, a few steps apart; some at once, during the recovery from the kill before."""
    schedule, step = Schedule(), FIRST_STEP
    for _kill in range(CHAOS_KILLS):
        rank = seed.randrange(WORLD_SIZE)
        if schedule and seed.random() < CHAOS_AT_ONCE:
            schedule.append(fail(rank=rank, after_s=0.0))
            continue
        schedule.append(fail(rank=rank, step=step, during=seed.choice(PHASES[layout])))
        step += seed.randint(*CHAOS_GAP_STEPS)
    return [schedule]


def _connect(seed: random.Random, _: str) -> list[Schedule]:
    return [[connect(step=_choose_step(seed), connections=600)]]


def _choose_step(seed: random.Random) -> int:
    return seed.randint(FIRST_STEP, LAST_STEP)


TESTS = (
    FaultTest(
        1,
        "kill-rank",
        "kill -9 of one of 4 ranks: noticed <= 1 s, next step <= 10 s, same losses and parameters",
        _kill_one_rank,
        criteria.evaluate_kills,
    ),
    FaultTest(
        2,
        "kill-rank-0",
        "kill -9 of rank 0: noticed <= 1 s, next step <= 10 s, same losses and parameters",
        _kill_rank_0,
        criteria.evaluate_kills,
    ),
    FaultTest(
        3,
        "kill-supervisor",
        "kill -9 of the command, resumed after 5 s: no rank dies, stall <= 15 s, no step lost",
        _kill_supervisor,
        criteria.evaluate_killed_supervisor,
        is_over=criteria.is_adopted,
        seconds=12.0,
    ),
    FaultTest(
        4,
        "kill-loop",
        "kill -9 of random ranks every 9 s on average, 100 s, 3 times: >= 85% of the fault-free steps",
        _kill_all_the_time,
        criteria.evaluate_kill_loop,
        is_over=criteria.is_kill_loop_over,
        seconds=criteria.KILL_LOOP_S,
        calm_s=criteria.KILL_LOOP_S,
    ),
    FaultTest(
        5,
        "stop-rank",
        "SIGSTOP of ranks in 10 phases, 60 s each: named <= 5 s, next step <= 10 s, rejoins or ends",
        _stop_ranks,
        criteria.evaluate_stopped_ranks,
        is_over=criteria.is_rejoined,
        seconds=STOPS * 8.0 + STOP_S,
    ),
    FaultTest(
        6,
        "stop-supervisor",
        "SIGSTOP of the command for 20 s: no restart, stall <= 22 s",
        _stop_supervisor,
        criteria.evaluate_stopped_supervisor,
        seconds=21.0,
    ),
    FaultTest(
        7,
        "preempt",
        "SIGTERM, SIGKILL 10 s later: status 0, the resumed run loses no step, same losses and parameters",
        _preempt,
        criteria.evaluate_preemption,
        is_over=criteria.is_resumed,
        seconds=10.0,
    ),
    FaultTest(
        8,
        "slow-rank",
        "a rank 1.5 times slower: named within 20 steps with its phase; no alarm in 500 steps before",
        _slow_rank,
        criteria.evaluate_straggler,
        is_over=criteria.is_straggler_over,
        seconds=90.0,
        overrides=COMPUTE_BOUND,
        alone=True,
    ),
    FaultTest(
        9,
        "wrong-call",
        "another op, another shape, a skipped call: rank, op and source line named <= 5 s",
        _wrong_collective,
        criteria.evaluate_wrong_call,
        is_over=lambda _: False,
        seconds=6.0,
        ends_run=True,
    ),
    FaultTest(
        20,
        "bad-gradient",
        "NaN, Inf and a 2^20 spike in one rank's gradient: skipped on all ranks, named, state unchanged",
        _corrupt_gradients,
        criteria.evaluate_bad_gradients,
        is_over=criteria.is_past_gradients,
        seconds=2.0,
        changes_losses=True,
    ),
    FaultTest(
        23,
        "clock",
        "clock of a rank 60 s behind, then ahead, then kill -9 of another rank: same ranks and result",
        _shift_clocks,
        criteria.evaluate_clocks,
        seconds=2.0,
    ),
    FaultTest(
        24,
        "hostile-clients",
        "600 hostile connections: loopback ports only, no change, RSS growth <= 50 MB, no leak of ours",
        _connect,
        criteria.evaluate_attack,
        seconds=4.0,
    ),
    FaultTest(
        26,
        "chaos",
        "100 kills -9 of random ranks in random phases of one run: same losses and parameters",
        _kill_a_hundred,
        criteria.evaluate_chaos,
        seconds=1.5 * CHAOS_KILLS,
        overrides=("elastic.restarts=100",),
    ),
)


def _choose_end(kinds: set[str]) -> Callable[[Trial], bool]:
    """When a trial with these kinds of faults is over."""
    if "wrong_collective" in kinds:
        return lambda _: False
    if "corrupt_gradient" in kinds:
        return criteria.is_past_gradients
    if "kill_supervisor" in kinds:
        return criteria.is_adopted
    return criteria.is_resumed if "preempt" in kinds else criteria.is_settled


def build_custom_test(schedule: Schedule) -> FaultTest:
    """The test of a schedule that the user wrote."""
    ends_run = any(fault.kind == "wrong_collective" for fault in schedule)
    evaluate = criteria.evaluate_wrong_call if ends_run else criteria.evaluate_schedule
    kinds = {fault.kind for fault in schedule}
    if kinds == {"corrupt_gradient"}:
        evaluate = criteria.evaluate_bad_gradients
    return FaultTest(
        0,
        "schedule",
        "the invariants hold, and losses and parameters are those without faults",
        lambda *_: [list(schedule)],
        evaluate,
        is_over=_choose_end(kinds),
        seconds=sum(1.0 + (f.for_s or 0.0) + (f.after_s or 0.0) + (f.grace_s or 0.0) for f in schedule),
        ends_run=ends_run,
        changes_losses="corrupt_gradient" in kinds,
    )
