"""A pipeline schedule: the ordered actions of each rank.

Generators build it, the prover checks it, the walker assigns times, the plot draws it and the interpreter
runs it. Sends and receives are not listed: they follow from an action and its producer
(:func:`producer_of`).

Legend: ``pp`` ranks; stage 0 is the first of the model; each stage is on one rank.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    """Forward pass of a stage for one micro-batch."""
    BACKWARD = "B"
    """Input gradient of a stage; also its weight gradients if the backward pass is not split."""
    WEIGHT = "W"
    """Weight gradients of a stage, in a split backward pass."""


class Action(NamedTuple):
    """One action of a rank. It is a tuple, because a large schedule has a quarter of a million."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


Rows = tuple[tuple[Action, ...], ...]
"""The actions of every rank, in order."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: the order of every rank's actions, and the rank of each stage."""

    name: str
    """Name in ``layout.schedule``, or of the file."""
    micro_batches: int
    stage_ranks: tuple[int, ...]
    """The rank of each stage, first to last; a rank may have any number of stages."""
    ranks: Rows = field(repr=False)
    split_backward: bool
    """Whether weight gradients are separate actions."""
    forward_only: bool = False
    """Whether there are no backward passes: evaluation."""

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return max(self.stage_ranks) + 1

    @property
    def virtual_stages(self) -> int:
        """Stages per rank; the maximum if they differ."""
        return max(Counter(self.stage_ranks).values())

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @functools.cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """The rank of every action, and its index there."""
        return {a: (rank, at) for rank, row in enumerate(self.ranks) for at, a in enumerate(row)}

    def rank_of(self, stage: int) -> int:
        """The rank of a stage."""
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, first to last."""
        return tuple(stage for stage, home in enumerate(self.stage_ranks) if home == rank)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that every stage has once per micro-batch."""
        if self.forward_only:
            return (Kind.FORWARD,)
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return (*kinds, Kind.WEIGHT) if self.split_backward else kinds

    def expected(self) -> Iterator[Action]:
        """Every action that the schedule must have exactly once."""
        for kind in self.kinds():
            for stage in range(self.stages):
                for micro_batch in range(self.micro_batches):
                    yield Action(kind, stage, micro_batch)


def loop_ranks(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage, looping over the ranks: stage s on rank s mod pp."""
    return tuple(range(pp)) * virtual_stages


def v_shaped_ranks(pp: int) -> tuple[int, ...]:
    """The rank of each stage in a V with two stages per rank: rank 0 has the first and the last stage."""
    return (*range(pp), *reversed(range(pp)))


def producer_of(action: Action, stages: int) -> Action | None:
    """The action whose result this one needs; none for the first stage's forward pass.

    A forward pass needs that of the previous stage; a backward pass that of the next stage, or the forward
    pass of the last stage; weight gradients need the backward pass of their stage. If producer and consumer
    are on different ranks, the result is sent.
    """
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD:
        return Action(Kind.FORWARD, stage - 1, micro_batch) if stage else None
    if kind is Kind.WEIGHT:
        return Action(Kind.BACKWARD, stage, micro_batch)
    if stage == stages - 1:
        return Action(Kind.FORWARD, stage, micro_batch)
    return Action(Kind.BACKWARD, stage + 1, micro_batch)


def consumer_of(action: Action, stages: int) -> Action | None:
    """The action of another stage that needs this one's result, if any.

    The next stage's forward pass needs a forward pass; the previous stage's backward pass needs a backward
    pass. The last stage's forward pass, the first stage's backward pass and weight gradients have none.
    """
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD and stage < stages - 1:
        return Action(kind, stage + 1, micro_batch)
    if kind is Kind.BACKWARD and stage:
        return Action(kind, stage - 1, micro_batch)
    return None
