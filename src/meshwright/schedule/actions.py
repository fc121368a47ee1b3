"""What a pipeline schedule is: for each rank, the actions it does, in order.

This is the form that everything else shares: generators make it, the prover checks it, the walker gives it
times, the picture draws it and an interpreter may run it. Sends and receives are not written down: they
follow from the stages of an action and its producer (:func:`producer_of`), so they cannot disagree with it.

Legend: ``pp`` ranks, ``virtual_stages`` stages on each, so stages 0 to ``pp * virtual_stages - 1``.
"""

from __future__ import annotations

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


class Placement(StrEnum):
    """Which rank holds a stage."""

    LOOP = "loop"
    """Stage s on rank s mod pp; with one stage a rank, that is rank s."""
    VEE = "vee"
    """Down the ranks and up again: stage s on rank s, from pp on on rank 2 pp - 1 - s."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: the order of every rank's actions, and what is needed to read it."""

    name: str
    """As ``layout.schedule`` names it."""
    pp: int
    virtual_stages: int
    micro_batches: int
    split_backward: bool
    """Whether gradients of weights are actions of their own."""
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return self.pp * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return rank_of_stage(stage, self.pp, self.placement)

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that every stage does once for every micro-batch."""
        whole = (Kind.FORWARD, Kind.BACKWARD)
        return (*whole, Kind.WEIGHT) if self.split_backward else whole

    def expected(self) -> Iterator[Action]:
        """Every action that must be there exactly once."""
        for kind in self.kinds():
            for stage in range(self.stages):
                for micro_batch in range(self.micro_batches):
                    yield Action(kind, stage, micro_batch)


def rank_of_stage(stage: int, pp: int, placement: Placement) -> int:
    """The rank that holds a stage under a placement."""
    if placement is Placement.VEE and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def stages_of_rank(rank: int, pp: int, virtual_stages: int, placement: Placement) -> tuple[int, ...]:
    """The stages that a rank holds, first to last."""
    return tuple(s for s in range(pp * virtual_stages) if rank_of_stage(s, pp, placement) == rank)


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
