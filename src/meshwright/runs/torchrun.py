"""Training under torchrun: the launcher has started the ranks, and rank 0 plans for all.

Every rank makes the same call. Rank 0 plans, writes the run folder and shares its path through the rendezvous
store. At the end it waits until all ranks are done, and audits.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import read_record
from meshwright.core.errors import MeshwrightError, Problem, RunFailedError, UserError
from meshwright.core.events import Event
from meshwright.diagnose.out_of_memory import explain_oom
from meshwright.launch.environment import loopback_interface, prepare_environment
from meshwright.launch.exits import EXIT_OK
from meshwright.plan.contract import PLAN_FILE, PlanContract, read_earlier_plans, read_plan
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.prepare import ResumeMode, prepare_run
from meshwright.runs.reporter import Reporter
from meshwright.runs.train import EventListeners, TrainedRun, fail_run, finish_run
from meshwright.spec.layout import DEGREES
from meshwright.spec.load import apply_override, read_tree

REFUSED = "!"
STORE_TIMEOUT = timedelta(hours=24)
"""How long ranks wait while rank 0 prepares data; the launcher ends them if it dies."""


class RankFailedError(RunFailedError):
    """A rank other than 0 ended; rank 0 reports why."""

    @classmethod
    def of(cls, rank: int, status: int) -> RankFailedError:
        """The error of a rank with its exit status."""
        error = cls(Problem("run-rank-died", f"rank {rank} ended with status {status}; rank 0 reports why"))
        error.exit_status = status
        return error


def train_as_rank(job: LoadedJob, resume: bool, reporter: Reporter) -> TrainedRun:  # noqa: C901
    """Train as the rank that the launcher's variables name.

    Raises:
        RankFailedError: On a rank other than 0, if the run was refused or failed.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notices = prepare_environment(threads=1)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    import torch.distributed as dist  # noqa: PLC0415

    from meshwright.train.worker import run_rank  # noqa: PLC0415

    shared, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=STORE_TIMEOUT))
    # The launcher's store outlives an attempt: keys of an earlier one must not be read.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # So does a process that trains twice.
    call = shared.add(f"meshwright-attempt-{attempt}-calls-{rank}", 1)
    store: Any = dist.PrefixStore(f"meshwright-attempt-{attempt}-call-{call}", shared)
    if rank == 0:
        for notice in notices:
            reporter.progress(notice)
        folder = Path(_plan_for_all(store, job, "must" if resume else "may" if attempt else "no", reporter))
    else:
        run_dir = store.get("run_dir").decode()
        if run_dir == REFUSED:
            raise RankFailedError.of(rank, UserError.exit_status)
        folder = Path(run_dir)
    plan = read_plan(folder / PLAN_FILE)
    rank_store = dist.PrefixStore("ranks", store)
    failures: list[Event] = []

    def keep_failure(event: Event) -> None:
        if event["event"] == "error":
            failures.append(event)

    if rank != 0:
        status = run_rank(str(folder), keep_failure, rank_store)
        _suggest_changes(plan, failures, rank, reporter)
        store.set(f"done/{rank}", str(status))
        if status != EXIT_OK:
            raise RankFailedError.of(rank, status)
        store.wait([f"done/{other}" for other in range(world_size)], STORE_TIMEOUT)
        record = read_record(folder)
        return TrainedRun(
            plan, record, folder, audit_run(plan, record, read_earlier_plans(folder)), rank=rank
        )
    listeners = EventListeners(plan.job, folder, reporter)

    def on_event(event: Event) -> None:
        listeners.on_event(event)
        keep_failure(event)

    with listeners.attached():
        status = run_rank(str(folder), on_event, rank_store)
    store.set(f"done/{rank}", str(status))
    if status != EXIT_OK:
        error = fail_run(plan, RunFailedError(*_problems(failures, rank)), listeners, folder, reporter)
        error.exit_status = status
        raise error
    store.wait([f"done/{other}" for other in range(world_size)], STORE_TIMEOUT)
    return finish_run(plan, read_record(folder), folder, listeners, reporter)


def _problems(failures: list[Event], rank: int) -> list[Problem]:
    """The errors that this rank wrote when it failed."""
    found = [Problem.from_dict(problem) for event in failures for problem in event["problems"]]
    if found or not failures:
        return found or [Problem("run-rank-died", f"rank {rank} ended without an error message")]
    reason = f"{failures[0]['kind']}: {failures[0]['message'].splitlines()[0]}"
    return [Problem("run-rank-died", f"rank {rank} ended: {reason}")]


def _suggest_changes(plan: PlanContract, failures: list[Event], rank: int, reporter: Reporter) -> None:
    """After an out-of-memory error on a rank other than 0: report what would fit, which needs the planner."""
    for memory in (failure["memory"] for failure in failures if failure["memory"]):
        _, error = explain_oom(plan, memory, RunFailedError(*_problems(failures, rank)))
        reporter.progress(error.problems[0].fix)


def _plan_for_all(store: Any, job: LoadedJob, resume: ResumeMode, reporter: Reporter) -> str:
    """Prepare the run and publish its folder, or that there is none."""
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        _require_no_regrouping(job)
        prepared = prepare_run(_with_degree(job, world_size), resume, reporter, started=world_size)
    except MeshwrightError:
        store.set("run_dir", REFUSED)
        raise
    store.set("run_dir", prepared.assignment.run_dir)
    return prepared.assignment.run_dir  # the lock is released when this process ends


def _require_no_regrouping(job: LoadedJob) -> None:
    """Refuse settings that need ranks that regroup."""
    if job.spec.train.on_bad_step == "rollback":
        rule = "needs ranks that Meshwright starts: under torchrun they cannot regroup"
        fix = "Use skip or stop, or start the run with meshwright train"
        raise UserError(
            Problem("train-rollback-torchrun", rule, path="train.on_bad_step", value="rollback", fix=fix)
        )
    if spares := job.spec.elastic.spares:
        rule = "needs ranks that Meshwright starts: torchrun replaces failed ranks itself"
        fix = "Remove it, or start the run with meshwright train"
        raise UserError(
            Problem("elastic-spares-torchrun", rule, path="elastic.spares", value=spares, fix=fix)
        )


def _with_degree(job: LoadedJob, world_size: int) -> LoadedJob:
    """A layout that is left to the planner uses the ranks that the launcher has started."""
    tree = read_tree(job.source)
    for text in job.overrides:
        apply_override(tree, text)
    layout = tree.get("layout", {})
    if isinstance(layout, dict) and not any(key in layout for key in DEGREES):
        return job.with_overrides("layout.mode=given", f"layout.dp_replicate={world_size}")
    return job
