"""``torchrun -m meshwright train JOB``: the launcher has started the ranks; rank 0 plans for all.

Every rank runs the same command. Rank 0 plans, writes the run's folder and tells the others where it is,
through the store at which they meet anyway; at the end it waits for their last events and audits.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from meshwright.audit.record import read_record
from meshwright.cli.output import Output
from meshwright.cli.progress import EventListeners
from meshwright.cli.runs import write_run_page
from meshwright.cli.train import Resume, prepare_run, report, report_failure
from meshwright.core.errors import MeshwrightError, Problem, RunFailedError, UserError
from meshwright.core.events import Event
from meshwright.diagnose.out_of_memory import explain_oom
from meshwright.launch.environment import loopback_interface, prepare_environment
from meshwright.launch.exits import EXIT_OK
from meshwright.plan.contract import PLAN_FILE, Plan, read_plan
from meshwright.report.trackers import RunOutcome
from meshwright.spec.layout import DEGREES
from meshwright.spec.load import apply_override, read_tree

REFUSED = "!"
STORE_TIMEOUT = timedelta(hours=24)
"""How long ranks wait while rank 0 prepares data; the launcher ends them if it dies."""


def run_as_rank(output: Output, source: str, overrides: list[str], resume: bool) -> int:
    """Train as the rank that the launcher's variables name."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    notices = prepare_environment(threads=1)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    import torch.distributed as dist  # noqa: PLC0415

    from meshwright.train.worker import run_rank  # noqa: PLC0415

    shared, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=STORE_TIMEOUT))
    # The launcher's store outlives an attempt: keys of an earlier one must not be read.
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store = dist.PrefixStore(f"meshwright-attempt-{attempt}", shared)
    if rank == 0:
        for notice in notices:
            output.errors.print(notice)
        resuming: Resume = "must" if resume else "may" if attempt else "no"
        run_dir = _plan_for_all(output, store, source, overrides, resuming, world_size)
    else:
        run_dir = store.get("run_dir").decode()
        if run_dir == REFUSED:  # rank 0 has said why
            return UserError.exit_status
    folder = Path(run_dir)
    plan = read_plan(folder / PLAN_FILE)
    rank_store = dist.PrefixStore("ranks", store)
    failures: list[Event] = []

    def keep_failure(event: Event) -> None:
        if event["event"] == "error":
            failures.append(event)

    if rank != 0:
        status = run_rank(run_dir, keep_failure, rank_store)
        store.set(f"done/{rank}", str(status))
        _suggest_changes(output, plan, failures, rank)
        return status
    listeners = EventListeners(output.errors, plan.job, folder)

    def on_event(event: Event) -> None:
        listeners.on_event(event)
        keep_failure(event)

    with listeners.attached():
        status = run_rank(run_dir, on_event, rank_store)
    store.set(f"done/{rank}", str(status))
    if status != EXIT_OK:
        error = RunFailedError(*_problems(failures, rank))
        report_failure(output, plan, error, listeners.record, folder)
        listeners.close(RunOutcome("failed", page=write_run_page(output, folder, "failed")))
        return status
    store.wait([f"done/{other}" for other in range(world_size)], STORE_TIMEOUT)
    return report(output, plan, read_record(folder), folder, listeners)


def _suggest_changes(output: Output, plan: Plan, failures: list[Event], rank: int) -> None:
    """After a rank other than 0 ran out of memory: its own error has no fix, which needs the planner."""
    for memory in (failure["memory"] for failure in failures if failure["memory"]):
        _, error = explain_oom(plan, memory, RunFailedError(*_problems(failures, rank)))
        output.errors.print(error.problems[0].fix, markup=False)


def _problems(failures: list[Event], rank: int) -> list[Problem]:
    """What this rank said of its end."""
    said = [Problem.from_dict(problem) for event in failures for problem in event["problems"]]
    if said or not failures:
        return said or [Problem("run-rank-died", f"rank {rank} ended without a word")]
    words = f"rank {rank} ended: {failures[0]['kind']}: {failures[0]['message'].splitlines()[0]}"
    return [Problem("run-rank-died", words)]


def _plan_for_all(
    output: Output, store: object, source: str, overrides: list[str], resume: Resume, world_size: int
) -> str:
    tell = getattr(store, "set")  # noqa: B009  (torch's stores have no stubs that mypy accepts)
    try:
        overrides = _with_degree(source, overrides, world_size)
        prepared = prepare_run(output, source, overrides, resume, started=world_size)
    except MeshwrightError:
        tell("run_dir", REFUSED)
        raise
    tell("run_dir", prepared.assignment.run_dir)
    return prepared.assignment.run_dir  # the lock is dropped with this process


def _with_degree(source: str, overrides: list[str], world_size: int) -> list[str]:
    """A layout that is left to the planner takes the ranks that the launcher has started."""
    tree = read_tree(source)
    for text in overrides:
        apply_override(tree, text)
    layout = tree.get("layout", {})
    if isinstance(layout, dict) and not any(key in layout for key in DEGREES):
        return [*overrides, "layout.mode=given", f"layout.dp_replicate={world_size}"]
    return overrides
