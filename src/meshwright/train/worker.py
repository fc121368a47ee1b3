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
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.plan.contract import PLAN_FILE, read_plan
from meshwright.spec.execution import uses_torch_compile
from meshwright.train.compiler_import import skip_compiler_import
from meshwright.train.loop import train
from meshwright.train.out_of_memory import (
    OutOfMemoryRunError,
    explain_out_of_memory,
    is_out_of_memory,
    measure_free_memory,
)
from meshwright.train.trainer import Trainer, build_trainer

PEER_LOST_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
)
"""What gloo says when another rank went away: this rank is a victim, not the cause."""


def run_rank(run_dir: str, listener: Listener | None = None, store: dist.Store | None = None) -> int:
    """Train as this rank; returns the exit status."""
    return run_with_trainer(train, run_dir, listener, store)


def run_with_trainer(
    work: Callable[[Trainer], None],
    run_dir: str,
    listener: Listener | None = None,
    store: dist.Store | None = None,
) -> int:
    """Meet the other ranks, build this rank's trainer, work with it; returns the exit status.

    Args:
        work: What is done with the trainer: training, or a benchmark.
        run_dir: Folder with the plan and the assignment.
        listener: Told every event of this rank.
        store: Where the ranks meet, if not at the supervisor's.
    """
    folder = Path(run_dir)
    rank = int(os.environ.get("RANK", "0"))
    assignment = Assignment.read(folder)
    events = EventWriter(folder / EVENTS_FILE, rank, assignment.generation, listener)
    stop = StopSignal()
    plan, trainer, room = None, None, (0, 0)
    try:
        events.write("started", pid=os.getpid(), host=socket.gethostname(), torch=torch.__version__)
        plan = read_plan(folder / PLAN_FILE)
        if not uses_torch_compile(plan.job):
            skip_compiler_import()
        counter = CollectiveCounter()
        counter.install()
        mesh = init_mesh(plan.job, counter, store)
        room = measure_free_memory(plan)
        trainer = build_trainer(plan, assignment, mesh, counter, events)
        stop.bind(trainer)
        work(trainer)
        destroy_mesh(mesh)
        counter.remove()
    except Exception as error:
        if plan is not None and is_out_of_memory(error):
            return report_error(events, explain_out_of_memory(error, plan, rank, room, trainer))
        return report_error(events, error)
    finally:
        events.close()
    return EXIT_OK


class StopSignal:
    """Turns SIGINT and SIGTERM into a wish that the ranks agree on at the end of a step."""

    def __init__(self) -> None:
        self._pulled = False
        self._trainer: Any = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            hangup = number == signal.SIGHUP
            if not (hangup and signal.getsignal(number) is signal.SIG_IGN):  # nohup, or our supervisor
                signal.signal(number, self._pull)

    def bind(self, trainer: Any) -> None:
        """From now on the trainer is told; a wish from before is passed on."""
        self._trainer = trainer
        trainer.stop_requested = self._pulled

    def _pull(self, *_: object) -> None:
        self._pulled = True
        if self._trainer is not None:
            self._trainer.stop_requested = True


def report_error(events: EventWriter, error: Exception) -> int:
    """Write down what went wrong; victims of another rank's death say so by their status."""
    peer_lost = any(sign in str(error) for sign in PEER_LOST_MESSAGES)
    if isinstance(error, MeshwrightError):  # says what is wrong by itself
        said, problems = f"{error}\n", [problem.as_dict() for problem in error.problems]
        status = error.exit_status
    else:
        said, problems = traceback.format_exc(), []
        status = EXIT_PEER_LOST if peer_lost else EXIT_ERROR
    memory = error.memory if isinstance(error, OutOfMemoryRunError) else None
    said_of = {"message": str(error), "kind": type(error).__name__, "problems": problems}
    events.write("error", **said_of, peer_lost=peer_lost, memory=memory)
    os.write(2, said.encode())
    return status
