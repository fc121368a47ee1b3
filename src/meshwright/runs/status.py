"""Health and metrics of a run that trains: ``/health`` and ``/metrics`` (``elastic.metrics``).

The supervisor's process serves them; the ranks do nothing for it. Events update the figures, a scrape reads
them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from meshwright.audit.record import RunRecord
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import Event, to_json
from meshwright.core.version import __version__
from meshwright.elastic.rank_view import State
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.network import Address
from meshwright.launch.status_server import JSON, Reply, StatusServer
from meshwright.launch.token_file import create_token
from meshwright.plan.contract import PlanContract
from meshwright.report.prometheus import CONTENT_TYPE, MetricText
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import Job

TOKEN_FILE = "metrics-token"  # noqa: S105  (the name of a file)
"""In the run folder, if the job names no other."""
RECOVERING = frozenset({State.HALTING, State.REGROUPING, State.CHANGING, State.FAILED})


class RunStatus:
    """The contents of the pages. The supervisor calls ``feed``, the server's thread reads the pages."""

    def __init__(self, plan: PlanContract, record: RunRecord, supervisor: Supervisor) -> None:
        self._plan, self._record, self._supervisor = plan, record, supervisor
        self._lock = threading.Lock()
        self._step: Event = {}
        """The newest step of rank 0."""
        self._step_at: float | None = None
        self._verdict: str | None = None
        """Verdict on a hang, until a step is done."""
        self._memory_bytes: dict[int, int] = {}
        self._spent_s: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._failures = 0

    def follow(self, plan: PlanContract, supervisor: Supervisor) -> None:
        """The run goes on in another layout."""
        with self._lock:
            self._plan, self._supervisor = plan, supervisor
            self._memory_bytes, self._verdict = {}, None

    def feed(self, event: Event) -> None:
        """Take in an event, and pass it to the record."""
        with self._lock:
            self._record.feed(event)
            handler = getattr(self, f"_on_{event['event']}", None)
            if handler is not None:
                handler(event)

    def _on_step(self, event: Event) -> None:
        for kind, seconds in (event.get("spent_s") or {}).items():
            self._spent_s[event["rank"], kind] += seconds
        if event.get("memory_bytes") is not None:
            self._memory_bytes[event["rank"]] = event["memory_bytes"]
        if event["rank"] == 0:
            self._step, self._step_at, self._verdict = event, time.monotonic(), None

    def _on_state(self, event: Event) -> None:
        if event.get("peak_bytes") is not None:
            self._memory_bytes.setdefault(event["rank"], event["peak_bytes"])

    def _on_hang(self, event: Event) -> None:
        if event["cause"] not in ("computing", "running"):
            self._verdict = event["verdict"]

    def _on_rank_lost(self, event: Event) -> None:
        self._failures += 1
        self._verdict = None

    def health(self) -> Reply:
        """Status 200 while the run trains or starts, 503 while it recovers, hangs or has failed."""
        with self._lock:
            facts = self._describe()
        status = HTTPStatus.OK if facts["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
        return Reply(status, to_json(facts) + "\n", JSON)

    def _describe(self) -> dict[str, Any]:
        supervisor, state = self._supervisor, self._supervisor.state
        waits_again = state is State.WAITING and self._failures > 0
        return {
            "ok": state not in RECOVERING and not waits_again and self._verdict is None,
            "state": state.value,
            "generation": supervisor.generation,
            "step": self._step.get("step", self._record.furthest_step),
            "steps": self._plan.job.train.steps,
            "last_step_age_s": self._age_s(),
            "ranks": supervisor.world_size,
            "ranks_alive": supervisor.count_alive(),
            "verdict": self._verdict,
            "stragglers": [span.rank for span in self._record.stragglers.current],
        }

    def _age_s(self) -> float | None:
        return None if self._step_at is None else time.monotonic() - self._step_at

    def metrics(self) -> Reply:
        """All metrics in the text format of Prometheus."""
        with self._lock:
            text = MetricText("meshwright")
            self._add_state(text)
            self._add_steps(text)
            self._add_reliability(text)
        return Reply(HTTPStatus.OK, text.render(), CONTENT_TYPE)

    def _add_state(self, text: MetricText) -> None:
        job, facts = self._plan.job, self._describe()
        labels = {"name": job.name, "layout": job.layout.named_degrees(), "version": __version__}
        text.add("info", "gauge", "The run; always 1.", 1, **labels)
        for state in State:
            active = int(state is self._supervisor.state)
            text.add("state", "gauge", "1 for the state of the run.", active, state=state.value)
        text.add("healthy", "gauge", "1 if /health answers with status 200.", int(facts["ok"]))
        text.add("hung", "gauge", "1 if a rank is silent or stuck.", int(facts["verdict"] is not None))
        text.add("generation", "gauge", "Number of the generation, from 0.", facts["generation"])
        text.add("ranks", "gauge", "Ranks of the run.", facts["ranks"])
        text.add("ranks_alive", "gauge", "Ranks that have a process.", facts["ranks_alive"])
        age = "Time since the last step was done."
        text.add("last_step_age_seconds", "gauge", age, facts["last_step_age_s"])

    def _add_steps(self, text: MetricText) -> None:
        step, record = self._step, self._record
        text.add("step", "gauge", "Steps done.", step.get("step", record.furthest_step))
        text.add("steps_planned", "gauge", "Steps of the job.", self._plan.job.train.steps)
        text.add("loss", "gauge", "Loss of the last step.", step.get("loss"))
        text.add("eval_loss", "gauge", "Last held-out loss.", record.eval_loss, set="held-out")
        for name, loss in record.eval_losses.items():
            text.add("eval_loss", "gauge", "Last held-out loss.", loss, set=name)
        text.add("learning_rate", "gauge", "Learning rate of the last step.", step.get("lr"))
        text.add("grad_norm", "gauge", "Gradient norm before clipping.", step.get("grad_norm"))
        text.add("step_seconds", "gauge", "Time of the last step.", step.get("step_s"))
        unit = self._plan.job.unit
        rate = f"{unit.capitalize()} per second in the last step."
        text.add(f"{unit}_per_second", "gauge", rate, step.get("tokens_per_s"))
        text.add("mfu_ratio", "gauge", "Model FLOP utilisation of the last step.", step.get("mfu"))
        for rank, used in sorted(self._memory_bytes.items()):
            text.add("memory_bytes", "gauge", "Peak memory of a rank.", used, rank=rank)
        spent = "Time of a rank by what it was spent on."
        for (rank, kind), seconds in sorted(self._spent_s.items()):
            text.add("spent_seconds_total", "counter", spent, seconds, rank=rank, kind=kind)

    def _add_reliability(self, text: MetricText) -> None:
        record, goodput = self._record, self._record.goodput
        share = None if goodput is None or goodput.wall_s <= 0 else goodput.share
        text.add("goodput_ratio", "gauge", "Time of the steps that count, of the whole time.", share)
        text.add("failures_total", "counter", "Failures since this command began.", self._failures)
        text.add(
            "recoveries_total", "counter", "Failures that the run recovered from.", len(record.recoveries)
        )
        parts: defaultdict[str, float] = defaultdict(float)
        for recovery in record.recoveries:
            for part, seconds in recovery.parts().items():
                parts[part] += seconds
        for part, seconds in parts.items():
            text.add("recovery_seconds_total", "counter", "Time of recoveries by part.", seconds, part=part)
        text.add("replayed_steps_total", "counter", "Replayed steps.", record.steps.replayed)
        text.add("bad_steps_total", "counter", "Steps that changed nothing.", record.bad_steps)
        text.add("checkpoints_total", "counter", "Checkpoints committed.", record.saves.count)
        failed = len(record.checkpoint_failures)
        text.add("checkpoint_failures_total", "counter", "Checkpoints or copies not written.", failed)
        text.add("checkpoint_step", "gauge", "Step of the newest checkpoint.", record.checkpoint_step)
        blocked = "Time in which training waited for checkpoints."
        text.add("checkpoint_blocked_seconds_total", "counter", blocked, record.saves.blocked_s)
        named = len(record.stragglers.spans)
        text.add("stragglers_total", "counter", "Times that a rank was named as a straggler.", named)
        for span in record.stragglers.current:
            labels: dict[str, str | int] = {"rank": span.rank, "host": span.host, "phase": span.phase}
            text.add(
                "straggler_lateness_seconds", "gauge", "Lateness of a straggler.", span.lateness_s, **labels
            )


@contextlib.contextmanager
def serving_status(
    job: Job, run_dir: Path, status: RunStatus, reporter: Reporter, required: bool = True
) -> Iterator[None]:
    """Serve the pages around a run, if ``elastic.metrics`` asks for it.

    Args:
        job: Job of the run.
        run_dir: Folder of the run.
        status: What the pages show.
        reporter: Receives the address and the name of the token file.
        required: Whether an address that cannot be used is an error. Otherwise it is a warning.

    Raises:
        UserError: The address or the token file cannot be used.
    """
    if job.elastic.metrics is None:
        yield
        return
    try:
        server = _start_server(job.elastic.metrics, job.elastic.metrics_token_file, run_dir, status, reporter)
    except UserError as error:
        if required:
            raise
        reporter.warning(f"no metrics: {error}")
        yield
        return
    try:
        yield
    finally:
        server.close()


def _start_server(
    where: str, token_file: str | None, run_dir: Path, status: RunStatus, reporter: Reporter
) -> StatusServer:
    address = Address.parse(where, "elastic.metrics")
    path = run_dir / TOKEN_FILE if token_file is None else Path(token_file)
    token = create_token(path)
    try:
        server = StatusServer(address, token, {"/health": status.health, "/metrics": status.metrics})
    except OSError as error:
        rule, fix = (
            f"cannot be used: {error.strerror or error}",
            "Use another port, or an address of this machine",
        )
        raise UserError(
            Problem("metrics-address", rule, path="elastic.metrics", value=where, fix=fix)
        ) from None
    reporter.progress(f"metrics: http://{server.address}/metrics and /health, bearer token in {path}")
    return server
