"""One rank, from its start to its exit status."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.errors import MeshwrightError
from meshwright.core.events import EVENTS_FILE, EventWriter, Listener
from meshwright.launch.assignment import Assignment
from meshwright.launch.exits import EXIT_ERROR, EXIT_OK, EXIT_PEER_LOST
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import join_ranks, leave_ranks
from meshwright.plan.contract import PLAN_FILE, read_plan
from meshwright.spec.execution import hands_to_compiler
from meshwright.train.compiler_import import spare_compiler
from meshwright.train.loop import train
from meshwright.train.out_of_memory import OutOfMemoryRunError, explain_shortage, measure_room, ran_out
from meshwright.train.trainer import Session, build_session

PEER_LOST_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
)
"""What gloo says when another rank went away: this rank is a victim, not the cause."""


def run_rank(run_dir: str, listener: Listener | None = None, store: dist.Store | None = None) -> int:
    """Train as this rank; returns the exit status."""
    return run_session(train, run_dir, listener, store)


def run_session(
    work: Callable[[Session], None],
    run_dir: str,
    listener: Listener | None = None,
    store: dist.Store | None = None,
) -> int:
    """Meet the other ranks, build this rank's session, work with it; returns the exit status.

    Args:
        work: What is done with the session: training, or a benchmark.
        run_dir: Folder with the plan and the assignment.
        listener: Told every event of this rank.
        store: Where the ranks meet, if not at the supervisor's.
    """
    folder = Path(run_dir)
    rank = int(os.environ.get("RANK", "0"))
    assignment = Assignment.read(folder)
    events = EventWriter(folder / EVENTS_FILE, rank, assignment.generation, listener)
    stop = _StopSwitch()
    plan, session, room = None, None, (0, 0)
    try:
        events.write("started", pid=os.getpid(), host=socket.gethostname(), torch=torch.__version__)
        plan = read_plan(folder / PLAN_FILE)
        if not hands_to_compiler(plan.job):
            spare_compiler()
        counter = CollectiveCounter()
        counter.install()
        ranks = join_ranks(plan.job, counter, store)
        room = measure_room(plan)
        session = build_session(plan, assignment, ranks, counter, events)
        stop.bind(session)
        work(session)
        leave_ranks(ranks)
        counter.remove()
    except Exception as error:
        if plan is not None and ran_out(error):
            return report_error(events, explain_shortage(error, plan, rank, room, session))
        return report_error(events, error)
    finally:
        events.close()
    return EXIT_OK


class _StopSwitch:
    """Turns SIGINT and SIGTERM into a wish that the ranks agree on at the end of a step."""

    def __init__(self) -> None:
        self._pulled = False
        self._session: Any = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            hangup = number == signal.SIGHUP
            if not (hangup and signal.getsignal(number) is signal.SIG_IGN):  # nohup, or our supervisor
                signal.signal(number, self._pull)

    def bind(self, session: Any) -> None:
        """From now on the session is told; a wish from before is passed on."""
        self._session = session
        session.stop_wanted = self._pulled

    def _pull(self, *_: object) -> None:
        self._pulled = True
        if self._session is not None:
            self._session.stop_wanted = True


def report_error(events: EventWriter, error: Exception) -> int:
    """Write down what went wrong; victims of another rank's death say so by their status."""
    victim = any(sign in str(error) for sign in PEER_LOST_SIGNS)
    if isinstance(error, MeshwrightError):  # says what is wrong by itself
        said, problems = f"{error}\n", [problem.as_dict() for problem in error.problems]
        status = error.exit_status
    else:
        said, problems = traceback.format_exc(), []
        status = EXIT_PEER_LOST if victim else EXIT_ERROR
    memory = error.memory if isinstance(error, OutOfMemoryRunError) else None
    said_of = {"message": str(error), "kind": type(error).__name__, "problems": problems}
    events.write("error", **said_of, victim=victim, memory=memory)
    os.write(2, said.encode())
    return status
