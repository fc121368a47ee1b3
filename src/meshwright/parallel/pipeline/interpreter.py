"""Runs a schedule: the actions of this rank, one after the other, exactly as they are written.

The input of an action comes from another rank, from an earlier action of this rank or from the batch. Its
output goes to the action that needs it. An action runner computes: pipeline stages or, in a benchmark, waits.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshwright.parallel.pipeline.action_times import ActionTimes
from meshwright.parallel.pipeline.p2p import P2PExchange
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule, consumer_of, producer_of


class ActionRunner(Protocol):
    """Computes the actions of a schedule."""

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """Forward pass of a stage: from the output of the previous stage to the input of the next one."""

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """Backward pass of a stage: from the gradient of its output to that of its input."""

    def weight(self, stage: int, micro_batch: int) -> None:
        """The weight gradients of a split backward pass."""


class Interpreter:
    """One rank of a schedule."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        pp_rank: int,
        exchange: P2PExchange,
        times: ActionTimes | None = None,
    ) -> None:
        self._actions, self._stages = schedule.ranks[pp_rank], schedule.stages
        self._exchange, self._times = exchange, times
        self._is_local = {stage: schedule.rank_of(stage) == pp_rank for stage in range(schedule.stages)}

    def run(self, runner: ActionRunner) -> None:
        """Run every action once."""
        exchange, times, local_outputs = self._exchange, self._times, dict[Action, Tensor]()
        exchange.begin()
        if times is not None:
            times.begin()
        for action in self._actions:
            given = self._get_input(action, local_outputs)
            if times is not None:
                times.start()
            output = _compute(runner, action, given)
            del given
            if times is not None:
                times.end()
            if output is None:
                continue
            if exchange.sends(action):
                exchange.send(action, output)
            else:
                local_outputs[action] = output
            del output
        exchange.finish()
        if times is not None:
            times.finish()

    def _get_input(self, action: Action, local_outputs: dict[Action, Tensor]) -> Tensor | None:
        """The input of an action. Waits for it where another rank sends it."""
        source = producer_of(action, self._stages)
        if source is None or consumer_of(source, self._stages) != action:
            return None  # the batch, or what the stage itself keeps
        return local_outputs.pop(source) if self._is_local[source.stage] else self._exchange.receive(source)


def _compute(runner: ActionRunner, action: Action, given: Tensor | None) -> Tensor | None:
    kind, stage, micro_batch = action
    if kind is Kind.FORWARD:
        return runner.forward(stage, micro_batch, given)
    if kind is Kind.BACKWARD:
        return runner.backward(stage, micro_batch, given)
    runner.weight(stage, micro_batch)
    return None
