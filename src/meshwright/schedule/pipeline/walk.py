"""Computes start and end of every action of a schedule, from the times of stages and transfers.

A rank runs its actions in order; each starts when the rank is free and its inputs have arrived. Actions are
not reordered, so the walk is exact. Links have no contention: transfers do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.schedule.pipeline.actions import Kind, PipelineSchedule

Times = float | Sequence[float] | NDArray[np.float64]
Key = tuple[Kind, int, int]
"""Equal to an action, but faster to create."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds per micro-batch and stage: one number for all stages, or one for each."""

    forward_s: Times = 1.0
    backward_input_s: Times = 1.0
    backward_weight_s: Times = 1.0


@dataclass(frozen=True)
class Walk:
    """The timeline of a schedule."""

    start_s: tuple[tuple[float, ...], ...]
    """Start of each action, per rank, in schedule order."""
    end_s: tuple[tuple[float, ...], ...]
    makespan_s: float
    work_s: tuple[float, ...]
    """Compute time per rank."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time per rank, up to the makespan."""
        return tuple(self.makespan_s - work for work in self.work_s)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time: (pp - 1) / (m + pp - 1) for GPipe and 1F1B."""
        total = self.makespan_s * len(self.work_s)
        return sum(self.idle_s) / total if total else 0.0

    @property
    def bubble_overhead(self) -> float:
        """Makespan over the compute time of the busiest rank, minus 1: (pp - 1) / m for GPipe and 1F1B."""
        busiest = max(self.work_s)
        return self.makespan_s / busiest - 1 if busiest else 0.0


def walk_schedule(
    schedule: PipelineSchedule, times: StageTimes, transfer_s: Times = 0.0, overlap: bool = True
) -> Walk:
    """Compute the timeline of a schedule.

    Args:
        schedule: A proved one; see ``proof.py``.
        times: Times of the stages. A full backward pass takes the sum of its two parts.
        transfer_s: Seconds of a transfer between adjacent stages on different ranks, in either direction;
            one number, or one for each of the ``stages - 1`` boundaries.
        overlap: Whether the sender computes during a transfer. If not, it waits until the transfer is done;
            the receiver only waits for the data.

    Raises:
        ValueError: The schedule has a deadlock.
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
    """A plain list, because indexing arrays is slow in loops."""
    found = np.atleast_1d(np.asarray(value, dtype=float))
    if found.ndim != 1 or len(found) not in (1, count):
        raise ValueError(f"{name} has the shape {found.shape}; give one number, or {count}")
    return [float(found[0])] * count if len(found) == 1 else [float(x) for x in found]


class _State:
    """The simulation: each rank advances until it needs a missing result, and continues when that arrives."""

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
        self._arrived: dict[Key, float] = {}
        self._waiting: dict[Key, int] = {}
        self._sends = _send_times(schedule, borders)

    def run(self) -> None:
        """Run until every action has its times."""
        ready = list(range(self.schedule.pp))
        while ready:
            rank = ready.pop()
            ready += self._advance(rank)
        missing = [r for r, row in enumerate(self.schedule.ranks) if len(self.end_s[r]) < len(row)]
        if missing:
            action = self.schedule.ranks[missing[0]][len(self.end_s[missing[0]])]
            raise ValueError(f"rank {missing[0]} never gets the input of {action}: prove the schedule first")

    def _advance(self, rank: int) -> list[int]:
        """Advance one rank; returns the ranks that were waiting for its results.

        ``producer_of`` is inlined and all names are local, for speed: a large step has a quarter of a million
        actions. A weight gradient does not wait: the proof has checked that it follows its backward pass.
        """
        row, starts, ends = self.schedule.ranks[rank], self.start_s[rank], self.end_s[rank]
        arrived, waiting, sends, overlap = self._arrived, self._waiting, self._sends, self.overlap
        durations, last = self.durations, self.schedule.stages - 1
        now, resumed = self._free_s[rank], []
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
                    resumed.append(waiting.pop(action))
        self._free_s[rank] = now
        return resumed


def _send_times(schedule: PipelineSchedule, borders: list[float]) -> dict[Kind, list[float]]:
    """Seconds to send a stage's result; 0 if the next stage is on the same rank."""
    ranks = schedule.stage_ranks
    costs = [s if ranks[i] != ranks[i + 1] else 0.0 for i, s in enumerate(borders)]
    return {Kind.FORWARD: [*costs, 0.0], Kind.BACKWARD: [0.0, *costs]}
