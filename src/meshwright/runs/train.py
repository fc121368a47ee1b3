"""Trains a prepared run on this machine: starts the ranks, follows their events, audits at the end."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.audit.compare import Audit, audit_run
from meshwright.audit.event_scan import read_record
from meshwright.audit.record import RunRecord
from meshwright.core.errors import InterruptedRunError, Problem, RunFailedError, UserError
from meshwright.core.events import Event
from meshwright.core.units import format_plural
from meshwright.diagnose.out_of_memory import explain_oom
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.assignment import Assignment
from meshwright.launch.caught_signals import caught_signals
from meshwright.launch.local import LocalAgent
from meshwright.launch.lock import RunLock
from meshwright.launch.network import ListenOptions
from meshwright.plan.contract import PLAN_FILE, PlanContract, read_earlier_plans, read_plan
from meshwright.report.tensorboard import TensorBoardSink
from meshwright.report.trackers import RunOutcome, build_trackers
from meshwright.runs.layouts import FindCheckpoint, RunLayouts, stores_of
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.nodes import NodeListener, make_absolute, place_ranks, remove_nonces
from meshwright.runs.prepare import PreparedRun, find_orphans, prepare_run
from meshwright.runs.ranks import build_launch, list_preload
from meshwright.runs.reporter import Reporter
from meshwright.runs.status import RunStatus, serving_status
from meshwright.runs.summary import summarize_run
from meshwright.spec.job import Job

ENTRY = "meshwright.train.worker:run_rank"


@dataclass(frozen=True)
class TrainedRun:
    """A run that ended as it should, or was interrupted with a checkpoint."""

    plan: PlanContract
    record: RunRecord
    run_dir: Path
    audit: Audit
    page: Path | None = None
    """The report page, if it could be written."""
    rank: int = 0
    """This process's rank under torchrun; 0 otherwise."""
    by_ctrl_c: bool = False
    """Whether Ctrl-C stopped it, and not SIGTERM or SIGHUP."""


class _UnfinishedRun:
    """Attributes of the two errors below."""

    run_dir: Path = Path()
    page: Path | None = None
    """The report page, if it could be written."""
    out_of_memory: dict[str, Any] | None = None
    """The memory report of the rank that ran out of memory, if one did."""


class TrainingFailedError(_UnfinishedRun, RunFailedError):
    """A rank died, or SIGTERM or SIGHUP ended the run without a checkpoint; carries the run folder."""


class TrainingInterruptedError(_UnfinishedRun, InterruptedRunError):
    """Ctrl-C stopped the run at once, before a checkpoint was written; carries the run folder."""


class EventListeners:
    """Passes the events of a run to its record, the reporter, TensorBoard and the trackers."""

    def __init__(self, job: Job, run_dir: Path, reporter: Reporter) -> None:
        self.record = read_record(run_dir)
        """The record of all attempts: the earlier ones from the file."""
        self._job, self._reporter = job, reporter
        self._tensorboard = TensorBoardSink(run_dir) if job.train.tensorboard else None
        self._trackers = build_trackers(job, run_dir, reporter.warning)
        self.feed = self.record.feed
        """Takes every event first."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Around the run; flushes TensorBoard at the end."""
        try:
            with self._reporter.training(self._job):
                yield
        finally:
            if self._tensorboard is not None:
                self._tensorboard.close()

    def on_event(self, event: Event) -> None:
        """Pass one event to all."""
        self.feed(event)
        self._reporter.event(event)
        if self._tensorboard is not None:
            self._tensorboard.feed(event)
        for tracker in self._trackers:
            tracker.feed(event)

    def close(self, outcome: RunOutcome) -> None:
        """Tell the trackers how the run ended."""
        for tracker in self._trackers:
            tracker.close(outcome)


def train_locally(
    job: LoadedJob,
    resume: bool,
    reporter: Reporter,
    entry: str | None = None,
    listen: ListenOptions = ListenOptions(),  # noqa: B008  (immutable)
) -> TrainedRun:
    """Prepare the run and train it in processes of this machine, and of others whose agents join.

    A run to resume whose ranks still train, because only their supervisor has died, is adopted.

    Args:
        job: To train.
        resume: Whether to continue from the newest checkpoint.
        reporter: Receives messages and events.
        entry: ``module:function`` of a rank, for fault tests; None for training.
        listen: Where the agents of other nodes join.
    """
    with NodeListener.opened(job.spec.cluster, listen, reporter) as nodes:
        run_dir = find_orphans(job.spec) if resume else None
        if run_dir is not None:
            with RunLock.take(run_dir):
                adopted = _adopt(job, run_dir, reporter, nodes)
            if adopted is not None:
                return adopted
        prepared = prepare_run(job, "must" if resume else "no", reporter, with_agents=nodes is not None)
        with prepared.locks:
            if nodes is None:
                return _supervise(prepared.plan, prepared.assignment, reporter, entry=entry)
            return _supervise_nodes(prepared, nodes, reporter)


def _supervise_nodes(prepared: PreparedRun, nodes: NodeListener, reporter: Reporter) -> TrainedRun:
    """Train on several nodes. If one is refused before training, the run folder is deleted."""
    plan, assignment = prepared.plan, make_absolute(prepared.assignment)
    others, limit = plan.job.cluster.nodes - 1, plan.job.elastic.join_timeout_s
    reporter.progress(f"waiting for {format_plural(others, 'agent')} to join, for at most {limit:g} s")
    local, remote = LocalAgent.start(list_preload(plan.job)), nodes.serve(plan, assignment)
    try:
        return _supervise(plan, assignment, reporter, AgentPool(local, place_ranks(plan), remote))
    except UserError:
        if assignment.generation == 0 and not read_record(Path(assignment.run_dir)).furthest_step:
            shutil.rmtree(assignment.run_dir, ignore_errors=True)
        raise
    finally:
        remove_nonces(assignment)


def _adopt(
    job: LoadedJob, run_dir: Path, reporter: Reporter, nodes: NodeListener | None
) -> TrainedRun | None:
    """Become the supervisor of ranks that train; None if they have ended."""
    agent = LocalAgent.adopt(
        run_dir,
        lambda: reporter.progress("the ranks of this run save and stop; waiting until they have ended"),
    )
    if agent is None:
        return None
    if any(not override.startswith("run_dir=") for override in job.overrides):
        reporter.warning(
            "the ranks of this run still train: they go on as they were started, without overrides"
        )
    plan, assignment = read_plan(run_dir / PLAN_FILE), Assignment.read(run_dir)
    with stores_of(plan, assignment).open(run_dir).locks:
        full = plan if assignment.full_plan is None else read_plan(run_dir / assignment.full_plan)
        remote = None if nodes is None else nodes.serve(full, assignment, adopting=True)
        agents = AgentPool(agent, place_ranks(plan, assignment), remote)
        return _supervise(plan, assignment, reporter, agents, adopts=True)


def _supervise(
    plan: PlanContract,
    assignment: Assignment,
    reporter: Reporter,
    agents: AgentPool | None = None,
    adopts: bool = False,
    entry: str | None = None,
) -> TrainedRun:
    """Start the ranks, or adopt them, and follow them to the end, through all layouts of the run."""
    run_dir, layouts = Path(assignment.run_dir), RunLayouts.of(plan, assignment)
    listeners = EventListeners(plan.job, run_dir, reporter)
    find_checkpoint = partial(_find_checkpoint, reporter)
    build = partial(_build_supervisor, entry or ENTRY, listeners, layouts, find_checkpoint)
    supervisor = build(plan, assignment)
    supervisor.agents, supervisor.adopts = agents, adopts
    if adopts:
        supervisor.furthest_step = listeners.record.furthest_step
    status = RunStatus(plan, listeners.record, supervisor)
    listeners.feed = status.feed
    try:
        with (
            caught_signals(lambda: None) as between,  # two supervisors; each catches its own
            serving_status(plan.job, run_dir, status, reporter, required=not adopts),
            listeners.attached(),
        ):
            supervisor.stops = between
            stops = supervisor.run()
            while supervisor.change is not None and layouts is not None:
                change = supervisor.change
                with _closing_on_error(change.agents):
                    plan, assignment, earlier = layouts.change(
                        plan, assignment, change, listeners.on_event, find_checkpoint
                    )
                    supervisor = build(plan, assignment)
                supervisor.agents, supervisor.earlier = change.agents, earlier
                supervisor.furthest_step, supervisor.stops = change.furthest_step, between
                status.follow(plan, supervisor)
                stops = supervisor.run()
    except RunFailedError as error:
        raise fail_run(plan, error, listeners, run_dir, reporter) from None
    # Events of adopted ranks went to the file before.
    record = read_record(run_dir) if adopts else listeners.record
    by_ctrl_c = signal.SIGINT in stops
    if stops and record.status == "unfinished":
        rule = "was stopped at once, before the step was finished and saved"
        kind = TrainingInterruptedError if by_ctrl_c else TrainingFailedError
        stopped = kind(Problem("run-ended-at-once", rule, path=str(run_dir)))
        stopped.run_dir, stopped.page = run_dir, write_run_page(run_dir, "unfinished", reporter)
        listeners.close(RunOutcome("unfinished", page=stopped.page))
        raise stopped
    return replace(finish_run(plan, record, run_dir, listeners, reporter), by_ctrl_c=by_ctrl_c)


def _build_supervisor(
    entry: str,
    listeners: EventListeners,
    layouts: RunLayouts | None,
    find_checkpoint: FindCheckpoint,
    plan: PlanContract,
    assignment: Assignment,
) -> Supervisor:
    """The supervisor of one layout of a run."""
    supervisor = build_launch(
        entry,
        plan.job,
        Path(assignment.run_dir),
        listeners.on_event,
        assignment.generation,
        list_preload(plan.job),
        partial(find_checkpoint, plan, assignment),
    )
    supervisor.layouts = None if layouts is None else layouts.choice
    supervisor.placement = place_ranks(plan, assignment)
    return supervisor


@contextmanager
def _closing_on_error(agents: AgentPool) -> Iterator[None]:
    """End the agents if the next layout cannot be written."""
    try:
        yield
    except BaseException:
        agents.close(ok=False)
        raise


def _find_checkpoint(reporter: Reporter, plan: PlanContract, assignment: Assignment) -> str | None:
    """The newest whole checkpoint of a run, verified. All ranks of the generation have ended their writes.

    Raises:
        RunFailedError: None verifies, or too few stores are reached.
    """
    stores = stores_of(plan, assignment)
    stores.finish_drafts()
    try:
        found = stores.find_newest()
    except UserError as error:
        raise RunFailedError(*error.problems) from None
    if found is None:
        return None
    for sentence in found[1]:
        reporter.warning(f"skipped: {sentence}")
    return str(found[0])


def fail_run(
    plan: PlanContract, error: RunFailedError, listeners: EventListeners, run_dir: Path, reporter: Reporter
) -> TrainingFailedError:
    """Write the page of a failed run and close its trackers; returns the error to raise.

    After an out-of-memory error, the fix is a change that the planner predicts to fit.
    """
    memory = listeners.record.oom_reports.get(str(error))
    if memory is not None:
        memory, error = explain_oom(plan, memory, error)
    failed = TrainingFailedError(*error.problems)
    failed.out_of_memory = memory
    failed.run_dir, failed.page = run_dir, write_run_page(run_dir, "failed", reporter)
    listeners.close(RunOutcome("failed", page=failed.page))
    return failed


def finish_run(
    plan: PlanContract, record: RunRecord, run_dir: Path, listeners: EventListeners, reporter: Reporter
) -> TrainedRun:
    """Audit a run that ended, write its page, close its trackers."""
    audit = audit_run(plan, record, read_earlier_plans(run_dir))
    page = write_run_page(run_dir, record.status, reporter)
    listeners.close(RunOutcome(record.status, summarize_run(plan, record, audit, run_dir), page))
    return TrainedRun(plan, record, run_dir, audit, page)


def write_run_page(run_dir: Path, status: str, reporter: Reporter) -> Path | None:
    """Write the page of a run that has just ended; an error is a warning, it does not fail the run."""
    try:
        from meshwright.report.html import write_page  # noqa: PLC0415  (the ranks start before)
        from meshwright.report.run_report import PAGE_FILE, read_report  # noqa: PLC0415

        page = run_dir / PAGE_FILE
        write_page(read_report(run_dir, status), page)
    except Exception as error:
        reporter.warning(f"the report was not written: {error}")
        return None
    return page
