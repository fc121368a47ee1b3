"""Dry run: builds one rank of a layout with fake tensors, runs one step, and compares it with the plan."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

from meshwright.audit.compare import Audit, audit_rank
from meshwright.audit.record import RunRecord
from meshwright.core.errors import Problem, UserError
from meshwright.core.packages import require_packages
from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import plan_from
from meshwright.plan.contract import PlanContract, layout_keys
from meshwright.plan.predict import Prediction, predict
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.planning import resolve_layout
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import Job
from meshwright.spec.load import require_runnable
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import with_eager_blocks


@dataclass(frozen=True)
class DryRun:
    """One rank, predicted and measured."""

    rank: int
    plan: PlanContract
    """For a CPU, as fake tensors are, with eager blocks."""
    prediction: Prediction
    """The same layout on the devices that the job names."""
    job: Job
    """The job with its layout."""
    audit: Audit
    seconds: float
    process_bytes: int
    """By how much the dry run raised the peak memory of this process."""

    def __repr__(self) -> str:
        return f"DryRun(rank={self.rank}, ok={self.ok}, plan={self.plan})"

    @property
    def ok(self) -> bool:
        """Whether the measured step matches the plan."""
        return self.audit.ok

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright dry-run --json``."""
        audit = self.audit.as_dict()
        return {
            "equal": audit.pop("audit_ok"),
            "rank": self.rank,
            "world_size": self.plan.world_size,
            "layout": layout_keys(self.plan.job),
            "micro_batches": self.plan.micro_batches,
            "device": self.plan.job.cluster.device,
            **audit,
            "job_device": self.job.cluster.device,
            "job_peak_bytes": self.prediction.ledger.peak_bytes,
            "fits": self.prediction.fits,
            "seconds": self.seconds,
            "process_bytes": self.process_bytes,
        }


def dry_run_job(job: LoadedJob, rank: int, reporter: Reporter) -> DryRun:
    """Run one step of one rank with fake tensors and audit it.

    Raises:
        UserError: The layout does not run, has no such rank, or the model is not a decoder.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="a dry run")
    spec = _resolve(job, rank, reporter)
    prediction = predict(spec, spec.layout)
    settled = prediction.job
    on_cpu = dataclasses.replace(
        settled, cluster=dataclasses.replace(spec.cluster, device="cpu"), train=with_eager_blocks(spec.train)
    )
    plan = plan_from(predict(on_cpu, settled.layout))
    prepare_environment(threads=1)
    started, before = time.perf_counter(), _peak_process_bytes()
    record = _run_step(plan, rank, reporter)
    seconds, grown = time.perf_counter() - started, _peak_process_bytes() - before
    return DryRun(rank, plan, prediction, spec, audit_rank(plan, rank, record), seconds, grown)


def _resolve(job: LoadedJob, rank: int, reporter: Reporter) -> Job:
    """The job with its layout, checked."""
    if not isinstance(job.spec.model, DecoderModel):
        rule, fix = "has no dry run: it supports decoders only", "Use meshwright plan"
        path, value = "model.architecture", job.spec.model.architecture
        raise UserError(Problem("dry-run-model", rule, path=path, value=value, fix=fix))
    spec = resolve_layout(job, reporter)
    require_runnable(spec)
    ranks = spec.layout.world_size
    if not 0 <= rank < ranks:
        rule = f"is not a rank of {spec.layout.named_degrees() or 'one process'}, which has {ranks}"
        fix = f"Use 0 to {ranks - 1}" if ranks > 1 else "Use 0"
        raise UserError(Problem("dry-run-rank", rule, path="rank", value=rank, fix=fix, is_argument=True))
    return spec


def _run_step(plan: PlanContract, rank: int, reporter: Reporter) -> RunRecord:
    """Run the step; the rank's events become the record."""
    name = f"rank {rank} of {plan.world_size}"
    record = RunRecord()
    with reporter.activity(f"{name}: starting") as update:
        from meshwright.verify.dry_run import dry_run_step  # noqa: PLC0415  (torch)

        dry_run_step(plan, rank, record.feed, lambda doing: update(f"{name}: {doing}"))
    return record


def _peak_process_bytes() -> int:
    """Peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
