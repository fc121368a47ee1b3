"""Runs a collective schedule on numbers, rank by rank in one process: a reference without the prover."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from meshwright.schedule.collective.ops import blocks_after, blocks_before, contributors
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine, Receive, Send


def make_inputs(schedule: CollectiveSchedule, elements: int, seed: int = 0) -> list[np.ndarray]:
    """One buffer per rank: random integers where the rank has data, and garbage elsewhere."""
    numbers = np.random.default_rng(seed)
    spans = schedule.spans(elements)
    buffers = []
    for rank in range(schedule.ranks):
        buffer = numbers.integers(10**9, 2 * 10**9, schedule.buffer_elements(elements))
        for block in blocks_before(schedule.op, rank, schedule.ranks, schedule.root, schedule.blocks):
            for chunk in schedule.block_chunks(block):
                low, high = spans[chunk]
                buffer[low:high] = numbers.integers(-(10**6), 10**6, high - low)
        buffers.append(buffer)
    return buffers


def run_schedule(schedule: CollectiveSchedule, elements: int, buffers: list[np.ndarray]) -> None:
    """Run in place, with buffered sends. Raises RuntimeError on a deadlock."""
    spans = schedule.spans(elements)
    channels: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)

    def view(rank: int, start: int, stop: int) -> np.ndarray:
        return buffers[rank][spans[start][0] : spans[stop - 1][1]]

    def run_rank(rank: int) -> Iterator[None]:
        """Yields while a message is missing."""
        for step in schedule.rows[rank]:
            for send in step.sends:
                channels[rank, send.peer].append(view(rank, send.start, send.stop).copy())
            for receive in step.receives:
                while not channels[receive.peer, rank]:
                    yield
                data, target = channels[receive.peer, rank].popleft(), view(rank, *receive[1:3])
                np.copyto(target, target + data if receive.combine is Combine.REDUCE else data)

    waiting = [run_rank(rank) for rank in range(schedule.ranks)]
    for _ in range(schedule.ranks * (1 + sum(map(len, schedule.rows)))):
        waiting = [rank for rank in waiting if next(rank, "done") is None]
    if waiting:
        raise RuntimeError("deadlock")


def run_ahead(schedule: CollectiveSchedule, elements: int, buffers: list[np.ndarray], seed: int) -> None:
    """Run in place and in a random order that keeps only the three orders of ``steps.py``.

    Raises RuntimeError on a deadlock.
    """
    chance = random.Random(seed)
    spans = schedule.spans(elements)
    channels: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    left: list[list[Send | Receive]] = [
        [a for step in row for a in (*step.sends, *step.receives)] for row in schedule.rows
    ]

    def can_run(rank: int, index: int) -> bool:
        action = left[rank][index]
        receives = isinstance(action, Receive)
        if receives and not channels[action.peer, rank]:
            return False
        for earlier in left[rank][:index]:
            same_kind = isinstance(earlier, Receive) == receives
            overlap = earlier.start < action.stop and action.start < earlier.stop
            if (same_kind and earlier.peer == action.peer) or (overlap and (receives or not same_kind)):
                return False
        return True

    while any(left):
        ready = [(r, i) for r, row in enumerate(left) for i in range(min(len(row), 12)) if can_run(r, i)]
        if not ready:
            raise RuntimeError("deadlock")
        rank, index = chance.choice(ready)
        action = left[rank].pop(index)
        view = buffers[rank][spans[action.start][0] : spans[action.stop - 1][1]]
        if isinstance(action, Send):
            channels[rank, action.peer].append(view.copy())
        else:
            data = channels[action.peer, rank].popleft()
            np.copyto(view, view + data if action.combine is Combine.REDUCE else data)


def wrong_chunks(
    schedule: CollectiveSchedule, elements: int, inputs: list[np.ndarray], outputs: list[np.ndarray]
) -> list[tuple[int, int]]:
    """Rank and chunk of every wrong result."""
    spans = schedule.spans(elements)
    wrong = []
    for rank in range(schedule.ranks):
        for block in blocks_after(schedule.op, rank, schedule.ranks, schedule.root, schedule.blocks):
            sources = contributors(schedule.op, block, schedule.ranks, schedule.root)
            for chunk in schedule.block_chunks(block):
                low, high = spans[chunk]
                expected = sum(inputs[source][low:high] for source in sources)
                if not np.array_equal(outputs[rank][low:high], expected):
                    wrong.append((rank, chunk))
    return wrong
