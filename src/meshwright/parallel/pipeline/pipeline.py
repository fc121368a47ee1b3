"""A rank's pipeline: its stages, the schedule that they follow, and what was recorded of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.layout.stages import schedule_of
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
    """One rank of it."""

    def __init__(
        self, stages: dict[int, Stage], job: Job, micro_batches: int, mesh: Mesh, precision: MixedPrecision
    ) -> None:
        """Be ready to follow the job's schedule.

        Args:
            stages: Of this rank, by number.
            job: The settled job.
            micro_batches: Of a step.
            mesh: All of them.
            precision: Of the products.
        """
        self._mesh, self._shape = mesh, activation_shape(job)
        self._dtype = RESIDUAL_DTYPES[job.train.residual_dtype]
        self._schedule = schedule_of(job, micro_batches)
        connect_pp_groups(self._schedule, mesh)
        self._work = StageRunner(stages, job, precision, mesh.device)
        self.times = ActionTimes(self._schedule.ranks[mesh.pp_rank], mesh.device)
        self._step = self._interpret(self._schedule, self.times)
        self._forward: dict[int, Interpreter] = {}

    def train(
        self, batches: Iterable[Batch], divisor: int, observer: StepObserver | None
    ) -> tuple[Tensor, int]:
        """Gradients of one step; returns the summed loss, zero without the last stage, and the targets.

        Args:
            batches: Of this rank's samples.
            divisor: Targets of all ranks' samples.
            observer: Looks on.
        """
        known = list(batches)
        self._work.begin(known, divisor, observer)
        self._step.run(self._work)
        self._work.finish()
        return self._work.loss_sum, _count_targets(known)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Forward passes alone; returns the same."""
        known = list(batches)
        if len(known) not in self._forward:
            self._forward[len(known)] = self._interpret(order_forward(self._schedule, len(known)))
        self._work.begin(known, 1, None)
        self._forward[len(known)].run(self._work)
        return float(self._work.loss_sum), _count_targets(known)

    def record(self) -> dict[str, Any]:
        """What ran when, for the rank's events."""
        return {"pp_rank": self._mesh.pp_rank, "steps": self.times.steps, "actions": self.times.rows()}

    def _interpret(self, schedule: PipelineSchedule, times: ActionTimes | None = None) -> Interpreter:
        proof = prove_schedule(schedule)
        assert proof.proved, f"a schedule that cannot run: {proof.violations}"
        exchange = P2PExchange(schedule, self._mesh, self._shape, self._dtype)
        return Interpreter(schedule, self._mesh.pp_rank, exchange, times)


def activation_shape(job: Job) -> tuple[int, ...]:
    """Of what goes from stage to stage: a micro-batch's residual stream, or the rank's tokens of it."""
    assert isinstance(job.model, DecoderModel), "the legality table cuts decoders only"
    samples, width = job.layout.micro_batch or 1, job.model.hidden_size
    length = job.data.seq_len // job.layout.cp
    if job.layout.sequence_parallel:
        return samples * length // job.layout.tp, width
    return samples, length, width


def _count_targets(batches: list[Batch]) -> int:
    return sum(int((batch.targets >= 0).sum()) for batch in batches)
