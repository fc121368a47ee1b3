"""Runs a schedule: this rank's actions, one after the other, exactly as they are written.

What an action needs comes from another rank, from the rank's action before, or from the batch; what it makes
goes on to whoever needs it. What the actions compute is the worker's business: a stage of a model, or, in a
benchmark, a wait.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshwright.parallel.pipeline.action_times import ActionTimes
from meshwright.parallel.pipeline.p2p import P2PExchange
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule, consumer_of, producer_of


class ActionRunner(Protocol):
    """Computes what actions are about."""

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """A stage's forward pass; gets what the stage before made, gives what the one behind needs."""

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Its backward pass; gets the gradient of what it gave, gives that of what it got."""

    def weight(self, stage: int, micro_batch: int) -> None:
        """The part of a split backward pass that nobody waits for."""


class Interpreter:
    """One rank of a schedule."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        pp_rank: int,
        exchange: P2PExchange,
        times: ActionTimes | None = None,
    ) -> None:
        self._row, self._stages = schedule.ranks[pp_rank], schedule.stages
        self._exchange, self._times = exchange, times
        self._homes = {stage: schedule.rank_of(stage) == pp_rank for stage in range(schedule.stages)}

    def run(self, worker: ActionRunner) -> None:
        """Do every action once."""
        exchange, times, handed = self._exchange, self._times, dict[Action, Tensor]()
        exchange.begin()
        if times is not None:
            times.begin()
        for action in self._row:
            given = self._take(action, handed)
            if times is not None:
                times.start()
            made = _compute(worker, action, given)
            del given
            if times is not None:
                times.end()
            if made is None:
                continue
            if exchange.sends(action):
                exchange.send(action, made)
            else:
                handed[action] = made
            del made
        exchange.finish()
        if times is not None:
            times.finish()

    def _take(self, action: Action, handed: dict[Action, Tensor]) -> Tensor | None:
        """What an action works on, once it is there."""
        source = producer_of(action, self._stages)
        if source is None or consumer_of(source, self._stages) != action:
            return None  # the batch, or what the stage itself has kept
        return handed.pop(source) if self._homes[source.stage] else self._exchange.receive(source)


def _compute(worker: ActionRunner, action: Action, given: Tensor | None) -> Tensor | None:
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD:
        return worker.forward(stage, micro_batch, given)
    if kind is Kind.BACKWARD:
        return worker.backward(stage, micro_batch, given)
    worker.weight(stage, micro_batch)
    return None
