"""Weights & Biases and MLflow, fed from the events of a run.

A tracker may be slow, unreachable or broken; this must not affect training. Each tracker has its own thread
for all calls, a bounded queue, and a time limit to finish. An exception disables it with one warning. Unless
the user names a server, both write into the run folder.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.events import Event
from meshwright.report.scalars import scalars_of
from meshwright.spec.job import Job
from meshwright.spec.load import job_tree

QUEUE_LENGTH = 10_000
"""Queued steps after which a slow tracker is disabled."""
FINISH_S = 60.0
"""Time limit to finish at the end of a run."""
REACH_S = 20
"""Time limit to reach the server."""

Warn = Callable[[str], None]


@dataclass(frozen=True)
class RunOutcome:
    """How the run ended."""

    status: str
    summary: dict[str, Any] = field(default_factory=dict)
    page: Path | None = None


class Tracker(Protocol):
    """A tracker; all calls come from one thread."""

    def start(self) -> None:
        """Open the run."""

    def log(self, step: int, when: float, scalars: dict[str, float]) -> None:
        """Log the scalars of one step."""

    def finish(self, outcome: RunOutcome) -> None:
        """Close the run."""


class WandbTracker:
    """Weights & Biases: offline in the run folder, unless WANDB_API_KEY or WANDB_MODE is set."""

    def __init__(self, project: str, job: Job, run_dir: Path, warn: Warn) -> None:
        self._project, self._job, self._run_dir, self._warn = project, job, run_dir, warn
        self._run: Any = None

    def start(self) -> None:
        """Open the run; offline if the server cannot be reached."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415  (an extra)

        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        try:
            self._run = self._open(wandb, mode)
        except wandb.errors.CommError:
            self._warn(f"W&B's server cannot be reached; it writes into {self._run_dir} instead")
            self._run = self._open(wandb, "offline")

    def _open(self, wandb: Any, mode: str) -> Any:
        settings = wandb.Settings(init_timeout=REACH_S, silent=True, console="off")
        name, folder = self._run_dir.resolve().name, str(self._run_dir)
        return wandb.init(
            project=self._project,
            name=name,
            dir=folder,
            mode=mode,
            config=job_tree(self._job),
            settings=settings,
        )

    def log(self, step: int, when: float, scalars: dict[str, float]) -> None:
        """Log the scalars of one step."""
        self._run.log(scalars, step=step)

    def finish(self, outcome: RunOutcome) -> None:
        """Log the summary, the report page and the status."""
        self._run.summary.update({"status": outcome.status, **plain_figures(outcome.summary)})
        if outcome.page is not None:
            shutil.copy(outcome.page, self._run.dir)  # files there are uploaded at the end
        self._run.finish(exit_code=0 if outcome.status == "complete" else 1)


class MlflowTracker:
    """MLflow: a database in the run folder, unless MLFLOW_TRACKING_URI names a server."""

    def __init__(self, experiment: str, job: Job, run_dir: Path) -> None:
        self._experiment, self._job, self._run_dir = experiment, job, run_dir
        self._client: Any = None
        self._run_id = ""

    def start(self) -> None:
        """Open the run; creates the experiment if needed."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default of 7 takes minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REACH_S))
        import mlflow  # noqa: PLC0415  (an extra)

        location = None
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            folder = (self._run_dir / "mlflow").resolve()
            folder.mkdir(exist_ok=True)
            address, location = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=address)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment, location)
        )
        self._run_id = self._client.create_run(experiment, run_name=self._run_dir.resolve().name).info.run_id
        parameters = [
            mlflow.entities.Param(name, str(value)[:500]) for name, value in flatten(job_tree(self._job))
        ]
        for start in range(0, len(parameters), 100):  # the limit of a server
            self._client.log_batch(self._run_id, params=parameters[start : start + 100])

    def log(self, step: int, when: float, scalars: dict[str, float]) -> None:
        """Log the scalars of one step."""
        from mlflow.entities import Metric  # noqa: PLC0415

        metrics = [Metric(name, value, int(when * 1000), step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, outcome: RunOutcome) -> None:
        """Log the summary, the report page and the status."""
        for name, value in plain_figures(outcome.summary).items():
            self._client.set_tag(self._run_id, f"summary.{name}", str(value))
        self._client.set_tag(self._run_id, "status", outcome.status)
        if outcome.page is not None:
            self._client.log_artifact(self._run_id, str(outcome.page))
        statuses = {"complete": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._run_id, statuses.get(outcome.status, "KILLED"))


class GuardedTracker:
    """Runs a tracker in a thread, so that it can neither slow down nor fail the run."""

    def __init__(self, name: str, tracker: Tracker, warn: Warn) -> None:
        self._name, self._tracker, self._warn = name, tracker, warn
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(QUEUE_LENGTH)
        self._off = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._jobs.put(tracker.start)
        self._thread.start()

    def feed(self, event: Event) -> None:
        """Queue one event; returns immediately."""
        if scalars := scalars_of(event):
            step, when = event["step"], event["time"]
            self._put(lambda: self._tracker.log(step, when, scalars))

    def close(self, outcome: RunOutcome, timeout_s: float = FINISH_S) -> None:
        """Finish within the time limit."""
        if self._off.is_set():
            return
        self._put(lambda: self._end(outcome))
        if not self._over.wait(timeout_s):
            self._disable(f"did not finish within {timeout_s:.0f} s")

    def _put(self, job: Callable[[], None]) -> None:
        if self._off.is_set():
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._disable(f"is {QUEUE_LENGTH} steps behind")

    def _end(self, outcome: RunOutcome) -> None:
        self._tracker.finish(outcome)
        self._over.set()

    def _work(self) -> None:
        while not self._off.is_set() and not self._over.is_set():
            job = self._jobs.get()
            try:
                job()
            except BaseException as error:  # including SystemExit
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._disable(f"failed: {reason}")

    def _disable(self, reason: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._over.set()
            self._warn(f"{self._name} {reason}; disabled, training continues")


def build_trackers(job: Job, run_dir: Path, warn: Warn) -> list[GuardedTracker]:
    """The trackers of a job."""
    wanted: list[tuple[str, Tracker]] = []
    if job.train.wandb is not None:
        wanted.append(("W&B", WandbTracker(job.train.wandb, job, run_dir, warn)))
    if job.train.mlflow is not None:
        wanted.append(("MLflow", MlflowTracker(job.train.mlflow, job, run_dir)))
    return [GuardedTracker(name, tracker, warn) for name, tracker in wanted]


def plain_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Scalar values of a summary."""
    return {key: value for key, value in summary.items() if isinstance(value, str | int | float)}


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
