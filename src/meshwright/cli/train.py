"""``meshwright train``: everything that can be refused is refused before the first file is written."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.audit.compare import Audit, audit_run
from meshwright.audit.record import RunRecord, format_loss
from meshwright.checkpoint.manifest import (
    check_same_job,
    check_same_optimizer,
    find_newest,
    list_checkpoints,
    read_manifest,
)
from meshwright.cli.app import require_packages
from meshwright.cli.audit import CHECK_FAILED, describe_audit
from meshwright.cli.data import prepare_data
from meshwright.cli.output import Output
from meshwright.cli.plan_text import describe_plan
from meshwright.cli.progress import EventListeners
from meshwright.cli.ranks import (
    apply_environment,
    build_launch,
    list_preload,
    require_compiler,
    require_devices,
)
from meshwright.cli.runs import write_run_page
from meshwright.cli.weights import InitialWeights
from meshwright.core.errors import InterruptedRunError, MeshwrightError, Problem, RunFailedError, UserError
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.diagnose.out_of_memory import describe_oom, explain_oom
from meshwright.launch.assignment import Assignment
from meshwright.launch.lock import RunLock
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, Plan, is_plan, layout_keys, read_plan, write_plan
from meshwright.report.pipeline_run import find_pipeline
from meshwright.report.trackers import RunOutcome
from meshwright.spec.job import Job
from meshwright.spec.load import load_job, named_layout_keys
from meshwright.spec.model import BATCH_NORM_NOTE
from meshwright.spec.presets import preset_names

ENTRY = "meshwright.train.worker:run_rank"
INTERRUPTED = InterruptedRunError.exit_status
Resume = Literal["no", "must", "may"]


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    plan: Plan
    assignment: Assignment
    lock: RunLock
    """Held while the run goes on: no second command writes into its folder."""


def run_training(output: Output, source: str, overrides: list[str], resume: bool) -> int:
    """Train on this machine, or as one rank of a launcher that has set torchrun's variables."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="training")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from meshwright.cli.torchrun import run_as_rank  # noqa: PLC0415

        return run_as_rank(output, source, overrides, resume)
    prepared = prepare_run(output, source, overrides, "must" if resume else "no")
    with prepared.lock:
        return run_prepared(output, prepared)


def prepare_run(
    output: Output, source: str, overrides: list[str], resume: Resume, started: int | None = None
) -> Prepared:
    """Check everything, plan, and write the run's folder.

    Args:
        output: Where people read.
        source: Job file or plan file.
        overrides: ``key.path=value`` texts.
        resume: Whether to go on from a checkpoint; "may" starts afresh where there is none.
        started: Ranks that a launcher has started already, if one has.
    """
    path = Path(source)
    refuse_preset(source)
    ready_plan = read_plan(path) if not overrides and is_plan(path) else None
    job = ready_plan.job if ready_plan else load_job(source, overrides)
    _require_trackers(job)
    require_compiler(job)
    plan = ready_plan or build_plan(job, named_layout_keys(source, overrides))[0]
    if started is not None and plan.world_size != started:
        rule = f"needs {plan.world_size} ranks, the launcher started {started}"
        raise UserError(
            Problem("launch-world-size", rule, path="layout", fix="Start as many as the layout has")
        )
    if started is None:
        require_devices(job, plan.world_size)
    weights = InitialWeights(job)
    if resume == "no":
        _ = weights.found  # refused before data are prepared, which may take long
    data_dir = prepare_data(output, job)
    describe_plan(output, plan)
    if job.mixes_samples:
        output.warn(BATCH_NORM_NOTE)
    cores = job.cluster.world_size
    if plan.world_size > cores:
        output.warn(f"{plan.world_size} ranks share {cores} {job.cluster.device_name}s: it works, but slower")
    return _write_run(output, plan, data_dir, resume, weights)


def refuse_preset(source: str) -> None:
    """A preset alone is enough to plan and too little to run."""
    if not Path(source).exists() and source in preset_names("models"):
        rule = "is a model preset: it says what to train, but neither on what data nor how long"
        fix = (
            f"Write a job file with model.preset = {source!r}; examples/quickstart.toml is one to start from"
        )
        raise UserError(Problem("train-needs-job", rule, path=source, fix=fix))


def _require_trackers(job: Job) -> None:
    """Whoever the job wants to be followed by must be installed."""
    if job.train.tensorboard:
        require_packages(("tensorboard", "tensorboard"), needed_for="train.tensorboard")
    if job.train.wandb is not None:
        require_packages(("wandb", "wandb"), needed_for="train.wandb")
    if job.train.mlflow is not None:
        require_packages(
            ("mlflow", "mlflow"), ("sqlalchemy", "mlflow"), ("alembic", "mlflow"), needed_for="train.mlflow"
        )


def run_prepared(output: Output, prepared: Prepared) -> int:
    """Start the ranks, show their progress, audit at the end."""
    plan, assignment = prepared.plan, prepared.assignment
    job, run_dir = plan.job, Path(assignment.run_dir)
    apply_environment(output, job)
    listeners = EventListeners(output.errors, job, run_dir)
    preload = list_preload(job)
    launch = build_launch(ENTRY, job, run_dir, listeners.on_event, assignment.generation, preload)
    try:
        with listeners.attached():
            interrupted = launch.run()
    except MeshwrightError as error:
        report_failure(output, plan, error, listeners.record, run_dir)
        listeners.close(RunOutcome("failed", page=write_run_page(output, run_dir, "failed")))
        return error.exit_status
    if interrupted and listeners.record.status == "unfinished":
        rule = "was ended at once, before the step was done and saved"
        problem = Problem("run-ended-at-once", rule, path=str(run_dir))
        output.failure(InterruptedRunError(problem), run_dir=run_dir)
        listeners.close(RunOutcome("unfinished", page=write_run_page(output, run_dir, "unfinished")))
        return INTERRUPTED
    return report(output, plan, listeners.record, run_dir, listeners)


def report_failure(
    output: Output, plan: Plan, error: MeshwrightError, record: RunRecord, run_dir: Path
) -> None:
    """Say why a run failed; of one that ran out of memory, with the predicted memory and what would fit."""
    memory = record.oom_reports.get(str(error))
    if memory is None:
        output.failure(error, [f"run folder: {run_dir}"], run_dir)
        return
    facts, error = explain_oom(plan, memory, error)
    output.failure(error, [*describe_oom(facts), f"run folder: {run_dir}"], run_dir, {"out_of_memory": facts})


def report(output: Output, plan: Plan, record: RunRecord, run_dir: Path, listeners: EventListeners) -> int:
    """Audit, print, leave a page, and turn the outcome into an exit status."""
    verdict = audit_run(plan, record)
    output.print()
    describe_audit(output, plan, record, verdict, find_pipeline(plan, record))
    output.print()
    if told := record.target_losses:
        held_out = f", {record.eval_loss:.4f} on held-out data" if record.eval_loss is not None else ""
        output.print(f"{record.status}: loss {format_loss(told[0])} to {format_loss(told[-1])}{held_out}")
    if without := record.targetless_text():
        output.print(without)
    if record.skipped_steps:
        steps = f"{record.skipped_steps} of {len(record.losses)} steps"
        output.print(
            f"{steps} were not taken: fp16 gradients overflowed and the loss scale was halved each time"
        )
    for failure in record.checkpoint_failures:
        output.warn(f"a checkpoint was not written: {failure} [checkpoint-not-written]")
    for rank, lost in record.events_lost.items():
        output.warn(f"rank {rank} lost {lost} or more lines of events.jsonl")
    if record.checkpoint:
        output.print(f"checkpoint: {record.checkpoint}")
    output.print(f"run folder: {run_dir}")
    page = write_run_page(output, run_dir, record.status)
    figures = summary(plan, record, verdict, run_dir)
    listeners.close(RunOutcome(record.status, figures, page))
    output.result({**figures, "report": str(page) if page else None})
    if record.status == "interrupted":
        return INTERRUPTED
    if record.last_checkpoint_failed:  # what was trained is lost: a script must not take it for done
        return RunFailedError.exit_status
    return 0 if verdict.ok else CHECK_FAILED


def summary(plan: Plan, record: RunRecord, verdict: Audit, run_dir: Path) -> dict[str, Any]:
    """The object of ``train --json``."""
    kinds = list(plan.ranks[0].state_bytes)
    found = [record.state.get(rank) for rank in range(plan.world_size)]
    return {
        "status": record.status,
        "run_dir": str(run_dir),
        "layout": layout_keys(plan.job),
        "world_size": plan.world_size,
        "losses": record.losses,
        "eval_loss": record.eval_loss,
        "tokens_per_s": record.tokens_per_s,
        "flops_per_s": record.flops_per_s(plan),
        "mfu": record.mfu,
        "mfu_basis": record.peak_basis,
        "peak_memory_bytes": [measured.peak_bytes if measured else None for measured in found],
        "predicted_peak_memory_bytes": [row.predicted for row in verdict.state if row.kind == "peak"],
        "state_bytes": {kind: [m.state_bytes.get(kind) if m else None for m in found] for kind in kinds},
        "predicted_state_bytes": {kind: [r.state_bytes[kind] for r in plan.ranks] for kind in kinds},
        "offloaded_bytes": {
            kind: [m.offloaded_bytes.get(kind) if m else None for m in found] for kind in kinds
        },
        "predicted_offloaded_bytes": {
            kind: [r.offloaded_bytes.get(kind, 0) for r in plan.ranks] for kind in kinds
        },
        "collectives": [row.as_dict() for row in verdict.collectives],
        "checkpoint": record.checkpoint,
        "audit_ok": verdict.ok,
        "differences": list(verdict.differences),
    }


def _write_run(
    output: Output, plan: Plan, data_dir: Path, resume: Resume, weights: InitialWeights
) -> Prepared:
    """Choose the run's folder and the checkpoint to resume; lock it; write plan and assignment."""
    job = plan.job
    run_dir = _run_dir(job, resume)
    checkpoints = Path(job.checkpoint.dir) if job.checkpoint.dir else run_dir / "checkpoints"
    try:
        resume_from = _choose_checkpoint(output, job, checkpoints, resume)
        hf_weights = resume_from is None and weights.settle(output)
    except UserError:
        if job.run_dir is None:  # the numbered folder was made just now; one with a run in it is not empty
            with contextlib.suppress(OSError):
                run_dir.rmdir()
        raise
    fresh = not (run_dir / EVENTS_FILE).exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = RunLock.take(run_dir)
        generation = _next_generation(run_dir)
        assignment = Assignment(
            run_dir=str(run_dir),
            data_dir=str(data_dir.resolve()),
            checkpoint_dir=str(checkpoints),
            resume_from=str(resume_from) if resume_from else None,
            hf_weights=hf_weights,
            generation=generation,
        )
        write_plan(plan, run_dir / PLAN_FILE)
        assignment.write()
        (run_dir / EVENTS_FILE).touch()
        checkpoints.mkdir(parents=True, exist_ok=True)
    except (OSError, UserError) as error:
        if fresh and not (isinstance(error, UserError) and error.problems[0].code == "run-busy"):
            shutil.rmtree(run_dir, ignore_errors=True)
        if isinstance(error, UserError):
            raise
        where = str(error.filename or run_dir)
        rule = f"cannot be written: {error.strerror or error}"
        fix = "Set run_dir or checkpoint.dir elsewhere"
        raise UserError(Problem("run-not-writable", rule, path=where, fix=fix)) from None
    return Prepared(plan, assignment, lock)


def _run_dir(job: Job, resume: Resume) -> Path:
    """The folder asked for; else a fresh numbered one, or the newest with checkpoints to resume."""
    if job.run_dir is not None:
        given = Path(job.run_dir)
        if resume == "no" and (given / EVENTS_FILE).exists():
            rule, fix = "holds a run already", "Add --resume to go on with it, or name another folder"
            raise UserError(Problem("run-exists", rule, path="run_dir", value=job.run_dir, fix=fix))
        if not (given / EVENTS_FILE).exists() and given.is_dir() and any(given.iterdir()):
            rule, fix = "is a folder with other things in it", "Name a new folder"
            raise UserError(Problem("run-exists", rule, path="run_dir", value=job.run_dir, fix=fix))
        return given
    runs = Path("runs")
    found = [(path.name.removeprefix(f"{job.name}-"), path) for path in runs.glob(f"{job.name}-*")]
    numbered = sorted((int(number), path) for number, path in found if number.isdigit())
    if resume == "may" and numbered:  # the run that an earlier attempt of this launch has begun
        return numbered[-1][1]
    if resume == "must" and job.checkpoint.dir is None:
        with_checkpoints = [path for _, path in numbered if list_checkpoints(path / "checkpoints")]
        if not with_checkpoints:
            rule = f"has no run with a checkpoint under {runs}"
            raise UserError(Problem("resume-nothing", rule, path=job.name, fix="Leave out --resume"))
        return with_checkpoints[-1]
    return _make_numbered(runs, job.name, numbered[-1][0] + 1 if numbered else 1)


def _make_numbered(runs: Path, name: str, number: int) -> Path:
    """Make the next free folder; two commands at once get two."""
    while True:
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            rule = f"cannot be made: {error.strerror or error}"
            fix = "Set run_dir elsewhere"
            raise UserError(Problem("run-not-writable", rule, path=str(folder), fix=fix)) from None
        else:
            return folder


def _choose_checkpoint(output: Output, job: Job, checkpoints: Path, resume: Resume) -> Path | None:
    """The checkpoint to go on from; None for a run that starts at the beginning."""
    if resume == "no" and list_checkpoints(checkpoints):
        rule = "holds checkpoints of another run"
        fix = "Add --resume to go on from them, or name another folder"
        raise UserError(Problem("checkpoint-dir-used", rule, path=str(checkpoints), fix=fix))
    if resume == "no":
        return None
    found = find_newest(checkpoints)
    if found is None and resume == "may":
        return None
    if found is None:
        rule = "holds no checkpoint"
        raise UserError(Problem("resume-nothing", rule, path=str(checkpoints), fix="Leave out --resume"))
    checkpoint, refused = found
    for sentence in refused:
        output.warn(f"passed over: {sentence}")
    manifest = read_manifest(checkpoint, verify=False)
    check_same_job(manifest, job.model, job.data, checkpoint)
    check_same_optimizer(manifest, job.train, checkpoint)
    if manifest.step >= job.train.steps:
        rule = f"is at step {manifest.step} already, and train.steps={job.train.steps}"
        raise UserError(
            Problem("resume-complete", rule, path=str(checkpoint), fix="Raise train.steps to go on")
        )
    return checkpoint


def _next_generation(run_dir: Path) -> int:
    events = run_dir / EVENTS_FILE
    if not events.exists():
        return 0
    log = read_events(events)
    return log.last_generation + 1 if log.events else 0
