"""Pipeline parallel on one rank: its stages, their schedule, and the times of its actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.layout.pipeline_schedules import schedule_of
from meshwright.measure.step_observer import StepObserver
from meshwright.models.dtypes import RESIDUAL_DTYPES
from meshwright.parallel.batch import Batch
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.action_times import ActionTimes
from meshwright.parallel.pipeline.interpreter import Interpreter
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.parallel.pipeline.p2p import P2PExchange, connect_pp_groups
from meshwright.parallel.pipeline.stages import Stage, StageRunner
from meshwright.schedule.pipeline.actions import PipelineSchedule
from meshwright.schedule.pipeline.forward_only import order_forward
from meshwright.schedule.pipeline.proof import prove_schedule
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class Pipeline:
    """One rank of a pipeline."""

    def __init__(
        self, stages: dict[int, Stage], job: Job, micro_batches: int, mesh: Mesh, precision: MixedPrecision
    ) -> None:
        """Connect the pp ranks and prepare the job's schedule.

        Args:
            stages: Stages of this rank, by number.
            job: The settled job.
            micro_batches: Micro-batches of a step.
            mesh: This rank's groups.
            precision: Autocast and loss scaling.
        """
        self._mesh, self._shape = mesh, activation_shape(job)
        self._dtype = RESIDUAL_DTYPES[job.train.residual_dtype]
        self._schedule = schedule_of(job, micro_batches)
        connect_pp_groups(self._schedule, mesh)
        self._runner = StageRunner(stages, job, precision, mesh.device)
        self._times = ActionTimes(self._schedule.ranks[mesh.pp_rank], mesh.device)
        self._train_step = self._build_interpreter(self._schedule, self._times)
        self._eval_steps: dict[int, Interpreter] = {}

    def train(
        self, batches: Iterable[Batch], num_targets: int, observer: StepObserver | None
    ) -> tuple[Tensor, int]:
        """Compute the gradients of one step.

        Args:
            batches: The micro-batches of this rank's samples.
            num_targets: Target tokens of the global batch.
            observer: Observes the step.

        Returns:
            The summed loss, zero without the last stage; and the target tokens of this rank's samples.
        """
        micro_batches = list(batches)
        self._runner.begin(micro_batches, num_targets, observer)
        self._train_step.run(self._runner)
        self._runner.finish()
        return self._runner.loss_sum, _count_targets(micro_batches)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Run forward passes only. Returns the same as :meth:`train`."""
        micro_batches = list(batches)
        count = len(micro_batches)
        if count not in self._eval_steps:
            self._eval_steps[count] = self._build_interpreter(order_forward(self._schedule, count))
        self._runner.begin(micro_batches, 1, None)
        self._eval_steps[count].run(self._runner)
        return float(self._runner.loss_sum), _count_targets(micro_batches)

    def time_next_steps(self, is_timed: bool) -> None:
        """Say whether the next steps count in the times of the actions."""
        self._times.is_timed = is_timed

    def record(self) -> dict[str, Any]:
        """The times of the actions, for the rank's events."""
        return {"pp_rank": self._mesh.pp_rank, "steps": self._times.steps, "actions": self._times.rows()}

    def _build_interpreter(self, schedule: PipelineSchedule, times: ActionTimes | None = None) -> Interpreter:
        proof = prove_schedule(schedule)
        assert proof.proved, f"a schedule that cannot run: {proof.violations}"
        exchange = P2PExchange(schedule, self._mesh, self._shape, self._dtype)
        return Interpreter(schedule, self._mesh.pp_rank, exchange, times)


def activation_shape(job: Job) -> tuple[int, ...]:
    """Shape of the residual stream that stages send: a micro-batch, or this rank's tokens of it."""
    assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
    samples, width = job.layout.micro_batch or 1, job.model.hidden_size
    length = job.data.seq_len // job.layout.cp
    if job.layout.sequence_parallel:
        return samples * length // job.layout.tp, width
    return samples, length, width


def _count_targets(batches: list[Batch]) -> int:
    return sum(int((batch.targets >= 0).sum()) for batch in batches)
