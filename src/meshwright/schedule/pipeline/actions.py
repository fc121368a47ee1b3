"""What a pipeline schedule is: for each rank, the actions it does, in order.

This is the form that everything else shares: generators make it, the prover checks it, the walker gives it
times, the picture draws it and an interpreter may run it. Sends and receives are not written down: they
follow from the stages of an action and its producer (:func:`producer_of`), so they cannot disagree with it.

Legend: ``pp`` ranks; stages count from 0, the first of the model, and each has one rank as its home.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    """A stage's forward pass of one micro-batch."""
    BACKWARD = "B"
    """Gradients of the stage's input; where the backward pass is not split, those of its weights too."""
    WEIGHT = "W"
    """Gradients of the stage's weights, where the backward pass is split."""


class Action(NamedTuple):
    """One piece of work of one rank: a tuple, because a large schedule has a quarter of a million."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: the order of every rank's actions, and what is needed to read it."""

    name: str
    """As ``layout.schedule`` names it."""
    micro_batches: int
    stage_ranks: tuple[int, ...]
    """The rank that holds each stage, first stage to last; any rank may hold any number of them."""
    ranks: tuple[tuple[Action, ...], ...]
    split_backward: bool
    """Whether gradients of weights are actions of their own."""
    forward_only: bool = False
    """Whether there are no backward passes at all: evaluation."""

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return max(self.stage_ranks) + 1

    @property
    def virtual_stages(self) -> int:
        """Stages of a rank; the most of any, where they differ."""
        return max(Counter(self.stage_ranks).values())

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return len(self.stage_ranks)

    @functools.cached_property
    def positions(self) -> dict[Action, tuple[int, int]]:
        """The rank of every action, and its position there."""
        return {a: (rank, at) for rank, row in enumerate(self.ranks) for at, a in enumerate(row)}

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.stage_ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, first to last."""
        return tuple(stage for stage, home in enumerate(self.stage_ranks) if home == rank)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that every stage does once for every micro-batch."""
        if self.forward_only:
            return (Kind.FORWARD,)
        whole = (Kind.FORWARD, Kind.BACKWARD)
        return (*whole, Kind.WEIGHT) if self.split_backward else whole

    def expected(self) -> Iterator[Action]:
        """Every action that must be there exactly once."""
        for kind in self.kinds():
            for stage in range(self.stages):
                for micro_batch in range(self.micro_batches):
                    yield Action(kind, stage, micro_batch)


def loop_ranks(pp: int, virtual_stages: int) -> tuple[int, ...]:
    """Homes of stages that go round the ranks: stage s on rank s mod pp."""
    return tuple(range(pp)) * virtual_stages


def v_shaped_ranks(pp: int) -> tuple[int, ...]:
    """Homes of two stages a rank, down the ranks and up again: the first rank also has the last stage."""
    return (*range(pp), *reversed(range(pp)))


def producer_of(action: Action, stages: int) -> Action | None:
    """The action whose result this one needs; none for the first stage's forward pass.

    A forward pass needs that of the stage before, a backward pass that of the stage behind (the last
    stage's own forward pass), the weights' gradients the backward pass of their own stage. Where producer
    and consumer are on different ranks, the result is sent.
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
    """The action of another stage that needs this one's result; none where the result stays in its stage.

    A forward pass is needed by that of the stage behind, a backward pass by that of the stage before. Nothing
    follows the last stage's forward pass, the first stage's backward pass, and gradients of weights.
    """
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD and stage < stages - 1:
        return Action(kind, stage + 1, micro_batch)
    if kind is Kind.BACKWARD and stage:
        return Action(kind, stage - 1, micro_batch)
    return None
