"""Gives every action of a schedule its start and end, from the times of stages and transfers.

A rank does its actions in order; each begins when the rank is free and what it needs has arrived. Nothing
is re-ordered, so the walk is exact for the order given. Links are never busy: two transfers do not slow
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.schedule.pipeline.actions import Kind, PipelineSchedule

Times = float | Sequence[float] | NDArray[np.float64]
Key = tuple[Kind, int, int]
"""What equals an action, and is made faster."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each stage: one number for all stages, or one for each."""

    forward_s: Times = 1.0
    backward_input_s: Times = 1.0
    backward_weight_s: Times = 1.0


@dataclass(frozen=True)
class Walk:
    """When everything happens."""

    start_s: tuple[tuple[float, ...], ...]
    """Of each action, a row a rank, in the schedule's order."""
    end_s: tuple[tuple[float, ...], ...]
    makespan_s: float
    work_s: tuple[float, ...]
    """Time of each rank that is spent computing."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Time of each rank, up to the last one's end, that is not."""
        return tuple(self.makespan_s - work for work in self.work_s)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time: (pp - 1) / (m + pp - 1) for GPipe and 1F1B."""
        total = self.makespan_s * len(self.work_s)
        return sum(self.idle_s) / total if total else 0.0

    @property
    def bubble_overhead(self) -> float:
        """How much longer the step is than the busiest rank's work: (pp - 1) / m for GPipe and 1F1B."""
        busiest = max(self.work_s)
        return self.makespan_s / busiest - 1 if busiest else 0.0


def walk_schedule(
    schedule: PipelineSchedule, times: StageTimes, transfer_s: Times = 0.0, overlap: bool = True
) -> Walk:
    """Walk a schedule.

    Args:
        schedule: One that is proved; see ``proof.py``.
        times: Of the stages. A backward pass that is not split takes both its parts.
        transfer_s: Seconds from a stage to the next one where they are on different ranks, either way; one
            number, or one for each of the ``stages - 1`` borders.
        overlap: Whether the sender goes on computing. If not, it waits until the transfer is over; the
            receiver waits for the data only.

    Raises:
        ValueError: The schedule cannot run to its end, which a proof would have said.
    """
    durations = _durations(schedule, times)
    borders = _per_stage(transfer_s, schedule.stages - 1, "transfer_s")
    state = _State(schedule, durations, borders, overlap)
    state.run()
    return Walk(
        tuple(map(tuple, state.start_s)),
        tuple(map(tuple, state.end_s)),
        max((row[-1] for row in state.end_s if row), default=0.0),
        tuple(sum(durations[a.kind][a.stage] for a in row) for row in schedule.ranks),
    )


def _durations(schedule: PipelineSchedule, times: StageTimes) -> dict[Kind, list[float]]:
    stages = schedule.stages
    forward = _per_stage(times.forward_s, stages, "forward_s")
    backward = _per_stage(times.backward_input_s, stages, "backward_input_s")
    weight = _per_stage(times.backward_weight_s, stages, "backward_weight_s")
    if not schedule.split_backward:
        backward = [b + w for b, w in zip(backward, weight, strict=True)]
    return {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.WEIGHT: weight}


def _per_stage(value: Times, count: int, name: str) -> list[float]:
    """A plain list: reading single numbers from an array is what makes such loops slow."""
    found = np.atleast_1d(np.asarray(value, dtype=float))
    if found.ndim != 1 or len(found) not in (1, count):
        raise ValueError(f"{name} has the shape {found.shape}; give one number, or {count}")
    return [float(found[0])] * count if len(found) == 1 else [float(x) for x in found]


class _State:
    """The ranks at work: each goes on until it needs what is not there, and then waits to be called."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        durations: dict[Kind, list[float]],
        borders: list[float],
        overlap: bool,
    ) -> None:
        self.schedule = schedule
        self.durations = durations
        self.overlap = overlap
        self.start_s: list[list[float]] = [[] for _ in schedule.ranks]
        self.end_s: list[list[float]] = [[] for _ in schedule.ranks]
        self._free_s = [0.0] * schedule.pp
        self._h2d_done: dict[Key, float] = {}
        self._waiting: dict[Key, int] = {}
        self._sends = _send_times(schedule, borders)

    def run(self) -> None:
        """Until every action has its times."""
        ready = list(range(self.schedule.pp))
        while ready:
            rank = ready.pop()
            ready += self._advance(rank)
        missing = [r for r, row in enumerate(self.schedule.ranks) if len(self.end_s[r]) < len(row)]
        if missing:
            action = self.schedule.ranks[missing[0]][len(self.end_s[missing[0]])]
            raise ValueError(f"rank {missing[0]} waits for ever before {action}: prove the schedule first")

    def _advance(self, rank: int) -> list[int]:
        """Go on with one rank; the ranks that can go on because of it.

        ``producer_of`` is written out here, and everything is a local name: a large step has a quarter of a
        million actions. A weight gradient waits for nothing: the prover saw it behind its backward pass.
        """
        row, starts, ends = self.schedule.ranks[rank], self.start_s[rank], self.end_s[rank]
        arrived, waiting, sends, overlap = self._h2d_done, self._waiting, self._sends, self.overlap
        durations, last = self.durations, self.schedule.stages - 1
        now, called = self._free_s[rank], []
        for position in range(len(ends), len(row)):
            action = row[position]
            kind, stage, m = action
            needed: Key | None
            if kind is Kind.FORWARD:
                needed = (kind, stage - 1, m) if stage else None
            elif kind is Kind.WEIGHT:
                needed = None
            else:
                needed = (kind, stage + 1, m) if stage < last else (Kind.FORWARD, stage, m)
            if needed is not None:
                there = arrived.get(needed)
                if there is None:
                    waiting[needed] = rank
                    break
                now = max(now, there)
            starts.append(now)
            now += durations[kind][stage]
            ends.append(now)
            if kind is not Kind.WEIGHT:
                send = sends[kind][stage]
                arrived[action] = now + send
                if not overlap:
                    now += send
                if action in waiting:
                    called.append(waiting.pop(action))
        self._free_s[rank] = now
        return called


def _send_times(schedule: PipelineSchedule, borders: list[float]) -> dict[Kind, list[float]]:
    """What it takes to hand a stage's result on; nothing where the next stage is on the same rank."""
    ranks = schedule.stage_ranks
    costs = [s if ranks[i] != ranks[i + 1] else 0.0 for i, s in enumerate(borders)]
    return {Kind.FORWARD: [*costs, 0.0], Kind.BACKWARD: [0.0, *costs]}
