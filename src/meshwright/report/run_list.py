"""Summaries of the runs in a folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import RunScan
from meshwright.core.errors import MeshwrightError, Problem, UserError
from meshwright.core.events import EVENTS_FILE
from meshwright.core.files import folder_bytes
from meshwright.launch.lock import is_held
from meshwright.plan.contract import PLAN_FILE, PlanContract, read_earlier_plans, read_plan

FINISHED = ("complete", "interrupted")


@dataclass(frozen=True)
class RunSummary:
    """Status and figures of a run; None if unknown."""

    name: str
    run_dir: str
    status: str
    """``complete``, ``interrupted``, ``failed``, ``running``, ``unfinished`` or ``damaged``."""
    steps: int
    target_steps: int | None = None
    ranks: int | None = None
    attempts: int = 0
    recoveries: int = 0
    """Failures of ranks after which it went on."""
    goodput: float | None = None
    """Time of the steps that count, of the whole time of all attempts."""
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    unit: str = "tokens"
    """Unit of the throughput."""
    audit_ok: bool | None = None
    """None unless the run finished."""
    measured: bool | None = None
    """Whether the audited step was reached; None unless the run finished."""
    began: float | None = None
    """Seconds since 1970."""
    size_bytes: int = 0
    reason: str = ""
    """Why it failed, or what is damaged."""

    def as_dict(self) -> dict[str, Any]:
        """The run for ``--json``."""
        return asdict(self)


def list_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder, or the run that it is, newest first.

    Raises:
        UserError: It is not a folder, or cannot be read.
    """
    if not folder.is_dir():
        rule, fix = (
            "is not a folder",
            "Give the folder that holds the runs; train creates runs/ where it is started",
        )
        raise UserError(Problem("runs-missing", rule, path=str(folder), fix=fix))
    try:
        return _list_folder(folder)
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise UserError(Problem("run-unreadable", rule, path=str(folder))) from None


def _list_folder(folder: Path) -> list[RunSummary]:
    if _is_run(folder):
        return [summarize_run(folder)]
    found = [summarize_run(path) for path in folder.iterdir() if path.is_dir() and _is_run(path)]
    return sorted(found, key=lambda run: (run.began or 0.0, run.name), reverse=True)


def summarize_run(folder: Path) -> RunSummary:
    """Summarise one run; a damaged run has a reason, it is not an error."""
    found = RunScan()
    damage: list[str] = []
    try:
        if torn := found.read(folder / EVENTS_FILE):
            damage.append(f"{torn} lines of {EVENTS_FILE} are truncated or of another version")
    except OSError as error:
        damage.append(f"{EVENTS_FILE} cannot be read: {error.strerror or error}")
    plan: PlanContract | None = None
    try:
        plan = read_plan(folder / PLAN_FILE)
    except MeshwrightError as error:
        damage.append(str(error.problems[0].rule) if error.problems else str(error))
    attempt, record = found.attempt, found.record
    broken = plan is None or not (folder / EVENTS_FILE).exists()
    status = "damaged" if broken else resolve_status(folder, record.outcome)
    verdict = None
    if plan and status in FINISHED:
        verdict = audit_run(plan, record, read_earlier_plans(folder))
    reasons = [*damage, *attempt.errors[:1]] if status in ("damaged", "failed") else damage
    return RunSummary(
        name=folder.name or str(folder.resolve().name),
        run_dir=str(folder),
        status=status,
        steps=attempt.last_step,
        target_steps=plan.job.train.steps if plan else attempt.steps,
        ranks=plan.world_size if plan else len(attempt.ranks) or None,
        attempts=record.newest.attempt + 1,
        recoveries=len(record.recoveries),
        goodput=None if record.goodput is None else record.goodput.share,
        loss=record.target_losses[-1] if record.target_losses else None,
        eval_loss=record.eval_loss,
        tokens_per_s=record.tokens_per_s,
        unit=plan.job.unit if plan else "tokens",
        audit_ok=verdict.ok if verdict else None,
        measured=verdict.measured if verdict else None,
        began=found.began if found.began is not None else _changed(folder),
        size_bytes=folder_bytes(folder),
        reason="; ".join(reasons),
    )


def resolve_status(folder: Path, written: str) -> str:
    """The status of the events, or ``running`` while a process holds the run's lock."""
    return "running" if written not in FINISHED and is_held(folder) else written


def _is_run(folder: Path) -> bool:
    return (folder / EVENTS_FILE).is_file() or (folder / PLAN_FILE).is_file()


def _changed(folder: Path) -> float | None:
    try:
        return folder.stat().st_mtime
    except OSError:
        return None
