"""What each rank has after each round of a proved schedule, for pictures and text."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from meshwright.schedule.collective.ops import blocks_before
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine

State = tuple[dict[int, frozenset[int]], ...]
"""Per rank: the contributors of each chunk that it has."""


class Transfer(NamedTuple):
    """A message of a round."""

    source: int
    target: int
    start: int
    stop: int
    combine: Combine


def list_transfers(schedule: CollectiveSchedule) -> list[list[Transfer]]:
    """The messages of each round, by source."""
    found: list[list[Transfer]] = [[] for _ in range(schedule.rounds)]
    for target, row in enumerate(schedule.rows):
        for step in row:
            found[step.round] += [Transfer(r.peer, target, *r[1:]) for r in step.receives]
    return [sorted(transfers) for transfers in found]


def trace_contributors(schedule: CollectiveSchedule) -> list[State]:
    """The state before the first round and after each round."""
    s = schedule
    held: list[dict[int, frozenset[int]]] = []
    for rank in range(s.ranks):
        blocks = blocks_before(s.op, rank, s.ranks, s.root, s.blocks)
        held.append({chunk: frozenset({rank}) for block in blocks for chunk in s.block_chunks(block)})
    states: list[State] = [tuple(dict(rank) for rank in held)]
    for transfers in list_transfers(schedule):
        before = states[-1]
        changed: dict[int, dict[int, frozenset[int]]] = defaultdict(dict)
        for t in transfers:
            for chunk in range(t.start, t.stop):
                received = before[t.source][chunk]
                if t.combine is Combine.REDUCE:
                    received |= changed[t.target].get(chunk, before[t.target][chunk])
                changed[t.target][chunk] = received
        states.append(tuple({**mine, **changed.get(rank, {})} for rank, mine in enumerate(before)))
    return states
