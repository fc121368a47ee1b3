"""One step of one rank of a layout, without devices, memory or the other ranks.

Tensors are torch's fake tensors (``fake_tensors``), and process groups are torch's fake groups, which return
at once. The step runs the same functions in the same order as a real rank, under the same collective counter
and memory tracker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the fake backend

from meshwright.core.events import EventWriter, Listener
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.weight_source import ZeroWeights
from meshwright.parallel.batch import Batch
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.plan.contract import PlanContract
from meshwright.train.batches import Batcher, Samples
from meshwright.train.build import build_trainer
from meshwright.train.loop import report_end
from meshwright.train.rank_context import RankContext
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer
from meshwright.verify.even_routing import route_evenly
from meshwright.verify.fake_tensors import RealIntegers, SharedChunks, keep_fsdp_shards
from meshwright.verify.synthetic_data import ZeroDataset

ProgressCallback = Callable[[str], None]
"""Called with a description of the current work."""


def dry_run_step(
    plan: PlanContract, rank: int, listener: Listener, report_progress: ProgressCallback
) -> None:
    """Run one audited step as a rank.

    Args:
        plan: Plan of a job for CPU with eager blocks.
        rank: Which rank to run.
        listener: Called with the events of the step, ``state`` and ``collectives``.
        report_progress: Called while it runs.
    """
    assert plan.job.cluster.device == "cpu", "the fake tensors are CPU tensors"
    counter, events = CollectiveCounter(), EventWriter(Path(os.devnull), rank, 0, listener)
    counter.install()
    mesh = None
    try:
        mesh = init_mesh(plan.job, counter, FakeStore(), rank, backend="fake")
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, RealIntegers():
            report_progress("building")
            assignment = Assignment(os.devnull, os.devnull, os.devnull)
            dataset = ZeroDataset(plan.job)
            with SharedChunks():
                context = RankContext(plan, assignment, mesh, counter, events)
                trainer = build_trainer(
                    context, open_split=lambda _: dataset, weights=ZeroWeights(plan.job.model)
                )
            keep_fsdp_shards(trainer.model)
            route_evenly(trainer.model, plan.job, trainer.parallel)
            batches = trainer.data.train
            assert isinstance(batches, Batcher), "decoders read tokens"
            _run_step(trainer, FakeBatcher(**vars(batches), fake=fake), report_progress)
    finally:
        if mesh is not None:
            destroy_mesh(mesh)
        counter.remove()
        events.close()


def _run_step(trainer: Trainer, batches: FakeBatcher, report_progress: ProgressCallback) -> None:
    samples = trainer.job.train.global_batch
    with ReportedStepAudit(trainer, report_progress) as audit:
        micro_batches = batches.micro_batches(np.arange(samples))
        trainer.compute_step(micro_batches, samples * trainer.job.data.seq_len, audit)
    trainer.state.advance(samples)
    report_end(trainer, evaluations=0, stopping=False)


class ReportedStepAudit(StepAudit):
    """The audit of a step that also reports progress."""

    def __init__(self, trainer: Trainer, report_progress: ProgressCallback) -> None:
        super().__init__(trainer)
        self._report_progress, self._micro_batches = report_progress, trainer.plan.micro_batches

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self._report_progress(f"micro-batch {micro_batch + 1} of {self._micro_batches}")
        super().before_forward(micro_batch)

    def after_backward(self) -> None:
        """The gradients are complete."""
        self._report_progress("updating")
        super().after_backward()


@dataclass(frozen=True, kw_only=True)
class FakeBatcher(Batcher):
    """Fake micro-batches of a rank; only the targets are real, since they are counted."""

    fake: FakeTensorMode

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """The arguments of the model, micro-batch by micro-batch."""
        for batch in super().micro_batches(samples, min_samples):
            faked = {
                name: self.fake.from_tensor(tensor)
                for name, tensor in batch._asdict().items()
                if tensor is not None and name != "targets"
            }
            yield batch._replace(**faked)
