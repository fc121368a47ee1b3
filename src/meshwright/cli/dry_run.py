"""``meshwright dry-run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.api import load_job
from meshwright.cli.audit import CHECK_FAILED, show_collectives, show_state
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.layout.text import describe_layout
from meshwright.spec.execution import uses_eager_blocks

if TYPE_CHECKING:
    from meshwright.results import DryRun


def dry_run_job(output: Output, source: str, overrides: Sequence[str], rank: int, on: str | None) -> int:
    """Dry-run one rank and print it beside the plan; status 3 if it does not match."""
    done = load_job(source, *overrides, on=on).dry_run(rank, reporter=ConsoleReporter(output))
    _describe(output, done)
    output.result(done.as_dict())
    return 0 if done.ok else CHECK_FAILED


def _describe(output: Output, done: DryRun) -> None:
    """Print the model that was built, the two tables, and the verdict."""
    plan, job, audit = done.plan, done.job, done.audit
    step = f"one step of {plan.micro_batches} x {plan.job.layout.micro_batch} samples, with fake tensors"
    what = f"{job.name}: {format_count(plan.parameters)} parameters, {describe_layout(plan.job.layout)}"
    output.print(f"{what}, rank {done.rank}: {step}")
    if not uses_eager_blocks(job):
        output.print("Blocks run eagerly here; activations of compiled or Triton blocks are only planned")
    show_state(output, audit)
    output.print()
    if audit.collectives:
        show_collectives(output, audit, "Collectives of this rank: setup and one step")
    else:
        output.print("Collectives: none predicted, none called")
    output.print()
    for sentence in _explain_device(done):
        output.print(sentence)
    if audit.ok:
        near = ", ".join(f"{row.kind} {row.match}" for row in audit.state if row.tolerance)
        output.print(f"Dry run: matches the plan. State and all collectives are equal, {near}.")
    for difference in audit.differences:
        output.print(f"Dry run: {difference} [dry-run-differs]")
    output.print(
        f"Took {format_seconds(done.seconds)} and {format_bytes(done.process_bytes)} of this machine's memory"
    )


def _explain_device(done: DryRun) -> list[str]:
    """A note for a job on other devices: what the figures mean, and whether the job fits there."""
    ledger, cluster = done.prediction.ledger, done.job.cluster
    sentences = []
    if cluster.device != "cpu":
        sentences.append(
            "The tables are for a CPU. On a GPU a norm keeps less, the loss uses larger chunks, libraries "
            f"take workspace: for {cluster.device_name} the plan predicts {format_bytes(ledger.peak_bytes)}, "
            f"at: {ledger.peak_at}"
        )
    if not done.prediction.fits:
        sentences.append(f"On {cluster.device_name} it {done.prediction.shortage}")
    return sentences
