"""``meshwright dry-run``: one rank of a layout, built and stepped on this machine, beside the plan."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.audit.compare import PEAK_TOLERANCE, Audit, audit_rank
from meshwright.audit.record import RunRecord
from meshwright.cli.app import require_packages
from meshwright.cli.audit import CHECK_FAILED, show_collectives, show_state
from meshwright.cli.output import Output
from meshwright.cli.prove import resolve_layout
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.launch.environment import prepare_environment
from meshwright.layout.text import describe_layout
from meshwright.plan.build import plan_from
from meshwright.plan.contract import Plan, layout_keys
from meshwright.plan.predict import Prediction, predict
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.spec.load import load_job, require_runnable
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import with_eager_blocks


@dataclass(frozen=True)
class DryRunPlan:
    """What one rank is rehearsed with."""

    plan: Plan
    """For a CPU, as fake tensors are; not compiled."""
    prediction: Prediction
    """The same layout on the devices that the job names."""
    asked: Job


def dry_run_job(output: Output, source: str, overrides: Sequence[str], rank: int, on: str | None) -> int:
    """Rehearse a rank and hold it against the plan; status 3 if bytes differ, or the peak by more than 5%."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="a dry run")
    prepared = prepare(output, source, list(overrides), rank, on)
    plan = prepared.plan
    prepare_environment(threads=1)
    started = time.perf_counter()
    record = dry_run_rank(output, plan, rank)
    seconds = time.perf_counter() - started
    verdict = audit_rank(plan, rank, record)
    describe(output, prepared, rank, verdict)
    memory = _process_bytes()
    output.print(f"Took {format_seconds(seconds)} and {format_bytes(memory)} of this machine's memory")
    output.result({**summary(prepared, rank, verdict), "seconds": seconds, "process_bytes": memory})
    return 0 if verdict.ok else CHECK_FAILED


def prepare(output: Output, source: str, overrides: list[str], rank: int, on: str | None) -> DryRunPlan:
    """Settle the layout and predict it, for the job's devices and for what fake tensors are.

    Raises:
        UserError: The layout does not run, has no such rank, or is not a decoder's.
    """
    job = load_job(source, overrides, on, to_run=False)
    if not isinstance(job.model, DecoderModel):
        rule, fix = "cannot be rehearsed: a dry run knows decoders alone", "Use meshwright plan"
        path, value = "model.architecture", job.model.architecture
        raise UserError(Problem("dry-run-model", rule, path=path, value=value, fix=fix))
    job = resolve_layout(output, job, source, overrides)
    require_runnable(job)
    ranks = job.layout.world_size
    if not 0 <= rank < ranks:
        rule = f"is not a rank of {job.layout.named_degrees() or 'one process'}: there are {ranks}"
        fix = f"Use --rank 0 to {ranks - 1}" if ranks > 1 else "Use --rank 0"
        raise UserError(Problem("dry-run-rank", rule, path="--rank", value=rank, fix=fix))
    prediction = predict(job, job.layout)
    placed = prediction.job
    on_cores = dataclasses.replace(
        placed,
        cluster=dataclasses.replace(job.cluster, device="cpu"),
        train=with_eager_blocks(job.train),
    )
    return DryRunPlan(plan_from(predict(on_cores, placed.layout)), prediction, job)


def dry_run_rank(output: Output, plan: Plan, rank: int) -> RunRecord:
    """Take the step; what the rank says of it is the record."""
    name = f"rank {rank} of {plan.world_size}"
    record = RunRecord()
    with output.errors.status(f"{name}: starting") as status:
        from meshwright.verify.dry_run import dry_run_step  # noqa: PLC0415  (torch)

        dry_run_step(plan, rank, record.feed, lambda doing: status.update(f"{name}: {doing}"))
    return record


def describe(output: Output, prepared: DryRunPlan, rank: int, verdict: Audit) -> None:
    """What was built, the two tables, and the verdict in words."""
    plan, job = prepared.plan, prepared.asked
    step = f"one step of {plan.micro_batches} x {plan.job.layout.micro_batch} samples, with fake tensors"
    what = f"{job.name}: {format_count(plan.parameters)} parameters, {describe_layout(plan.job.layout)}"
    output.print(f"{what}, rank {rank}: {step}")
    if not uses_eager_blocks(job):
        output.print("Not compiled: what compiled blocks keep is in the plan alone")
    show_state(output, verdict)
    output.print()
    if verdict.collectives:
        show_collectives(output, verdict, "Collectives of this rank, building it and one step")
    else:
        output.print("Collectives: none predicted, none called")
    output.print()
    for sentence in explain_device(prepared):
        output.print(sentence)
    if verdict.ok:
        output.print(
            "Dry run: the plan holds. State and every collective are equal, "
            f"activations and peak within {PEAK_TOLERANCE:.0%}."
        )
    for difference in verdict.differences:
        output.print(f"Dry run: {difference} [dry-run-differs]")


def explain_device(prepared: DryRunPlan) -> list[str]:
    """What the figures above are, where the job is for other devices; and whether it fits those."""
    ledger, cluster = prepared.prediction.ledger, prepared.asked.cluster
    said = []
    if cluster.device != "cpu":
        said.append(
            "The tensors are those of a CPU, and so is the plan beside them. On a GPU a norm keeps less, the "
            "loss takes larger chunks and libraries take workspace: for "
            f"{cluster.device_name} the plan says {format_bytes(ledger.peak_bytes)}, at: {ledger.peak_at}"
        )
    if not prepared.prediction.fits:
        said.append(f"On {cluster.device_name} it {prepared.prediction.shortage}")
    return said


def summary(prepared: DryRunPlan, rank: int, verdict: Audit) -> dict[str, Any]:
    """For programs."""
    plan, ledger = prepared.plan, prepared.prediction.ledger
    audit = verdict.as_dict()
    return {
        "equal": audit.pop("audit_ok"),
        "rank": rank,
        "world_size": plan.world_size,
        "layout": layout_keys(plan.job),
        "micro_batches": plan.micro_batches,
        "device": plan.job.cluster.device,
        **audit,
        "job_device": prepared.asked.cluster.device,
        "job_peak_bytes": ledger.peak_bytes,
        "fits": prepared.prediction.fits,
    }


def _process_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
