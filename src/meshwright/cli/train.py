"""``meshwright train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.api import Run, load_job
from meshwright.cli.output import Output, Verbosity
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import CheckFailedError, InterruptedRunError, MeshwrightError, RunFailedError


def run_training(
    output: Output,
    source: str,
    overrides: Sequence[str],
    resume: bool,
    listen: str | None = None,
    token_file: Path | None = None,
) -> int:
    """Train a job and print its audit; returns the exit status."""
    job = load_job(source, *overrides, to_run=True)
    reporter = ConsoleReporter(output)
    try:
        run = job.train(resume=resume, listen=listen, token_file=token_file, reporter=reporter)
    except (RunFailedError, InterruptedRunError) as error:
        return _report_failure(output, error)
    if run.rank != 0:  # rank 0 prints
        return 0
    _report_run(output, run)
    return _choose_status(run)


def _choose_status(run: Run) -> int:
    """The exit status of a run that ended as it should, or was stopped after a step."""
    if run.by_ctrl_c and run.record.status == "interrupted":
        return InterruptedRunError.exit_status
    if run.record.last_checkpoint_failed:  # the training is lost
        return RunFailedError.exit_status
    if run.record.status == "interrupted":  # SIGTERM or SIGHUP; the audit may have nothing to compare yet
        saved = run.record.checkpoint_step == run.record.furthest_step
        return 0 if saved else RunFailedError.exit_status
    return 0 if run.audit().ok else CheckFailedError.exit_status


def _report_failure(output: Output, error: MeshwrightError) -> int:
    """Print why a run failed; for out-of-memory errors with the memory table and changes that would fit."""
    from meshwright.diagnose.out_of_memory import describe_oom  # noqa: PLC0415

    run_dir = getattr(error, "run_dir", None)
    if run_dir is None:  # another rank of torchrun; rank 0 prints
        return error.exit_status
    oom = getattr(error, "out_of_memory", None)
    lines = [*(describe_oom(oom) if oom else []), f"run folder: {run_dir}"]
    output.failure(error, lines, run_dir, {"out_of_memory": oom} if oom else None)
    if page := getattr(error, "page", None):
        output.print(f"report: {page}")
    return error.exit_status


def _report_differences(output: Output, run: Run) -> None:
    """Say that a run trained to its end although its audit differs."""
    differences = run.audit().differences
    if run.record.status == "complete" and differences:
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        output.print(f"training finished; the audit differs: {differences[0]}{more}")


def _report_skipped_steps(output: Output, run: Run) -> None:
    """Say how many steps changed no parameter."""
    record, steps = run.record, len(run.record.losses)
    if record.skipped_steps:
        why = "fp16 gradients overflowed, and the loss scale was halved each time"
        output.print(f"{record.skipped_steps} of {steps} steps were skipped: {why}")
    if record.bad_steps:
        why = "the loss or the gradient norm was not finite, or a gradient spike"
        output.warn(f"{record.bad_steps} of {steps} steps were bad and changed nothing: {why}")


def _report_run(output: Output, run: Run) -> None:
    """Print the audit, the losses and the files of a run."""
    from meshwright.cli.audit import describe_audit, describe_verdict  # noqa: PLC0415
    from meshwright.report.event_text import format_loss  # noqa: PLC0415

    record = run.record
    if output.verbosity == Verbosity.verbose:
        output.print()
        describe_audit(output, run)
        output.print()
    elif output.verbosity == Verbosity.normal or not run.audit().ok:
        describe_verdict(output, run)
    if losses := record.target_losses:
        held_out = f", {record.eval_loss:.4f} on held-out data" if record.eval_loss is not None else ""
        held_out += "".join(f", {format_loss(loss)} on {name}" for name, loss in record.eval_losses.items())
        output.print(f"{record.status}: loss {format_loss(losses[0])} to {format_loss(losses[-1])}{held_out}")
    _report_differences(output, run)
    if without := record.targetless_text():
        output.print(without)
    _report_skipped_steps(output, run)
    for failure in record.checkpoint_failures:
        output.warn(f"a checkpoint was not written: {failure} [checkpoint-not-written]")
    for rank, lost in record.events_lost.items():
        output.warn(f"rank {rank} lost {lost} or more lines of events.jsonl")
    if record.checkpoint:
        output.print(f"checkpoint: {record.checkpoint}")
    output.print(f"run folder: {run.run_dir}")
    if run.page:
        output.print(f"report: {run.page}")
    output.result({**run.as_dict(), "report": str(run.page) if run.page else None})
