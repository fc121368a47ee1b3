"""One rank, from its start to its exit status."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

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
from meshwright.train.build import build_trainer
from meshwright.train.compiler_import import skip_compiler_import
from meshwright.train.loop import train
from meshwright.train.out_of_memory import (
    OutOfMemoryRunError,
    is_out_of_memory,
    measure_free_memory,
    report_out_of_memory,
)
from meshwright.train.stop_signal import StopSignal
from meshwright.train.trainer import RankContext, Trainer

PEER_LOST_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
)
"""What gloo raises when another rank is gone: then this rank is not the cause."""


def run_rank(run_dir: str, listener: Listener | None = None, store: dist.Store | None = None) -> int:
    """Train as this rank; returns the exit status."""
    return run_with_trainer(train, run_dir, listener, store)


def run_with_trainer(
    work: Callable[[Trainer], None],
    run_dir: str,
    listener: Listener | None = None,
    store: dist.Store | None = None,
) -> int:
    """Join the other ranks, build the trainer of this rank, run something with it.

    Args:
        work: Training, a proof, or a benchmark.
        run_dir: Folder with the plan and the assignment.
        listener: Called with every event of this rank.
        store: For the rendezvous; by default that of the supervisor.

    Returns:
        The exit status.
    """
    folder = Path(run_dir)
    rank = int(os.environ.get("RANK", "0"))
    assignment = Assignment.read(folder)
    events = EventWriter(folder / EVENTS_FILE, rank, assignment.generation, listener)
    stop = StopSignal()
    stop.install()
    plan, trainer, free = None, None, (0, 0)
    try:
        events.write("started", pid=os.getpid(), host=socket.gethostname(), torch=torch.__version__)
        plan = read_plan(folder / PLAN_FILE)
        if not uses_torch_compile(plan.job):
            skip_compiler_import()
        counter = CollectiveCounter()
        counter.install()
        mesh = init_mesh(plan.job, counter, store)
        free = measure_free_memory(plan)
        trainer = build_trainer(RankContext(plan, assignment, mesh, counter, events), stop)
        work(trainer)
        destroy_mesh(mesh)
        counter.remove()
    except Exception as error:
        if plan is not None and is_out_of_memory(error):
            return report_error(events, report_out_of_memory(error, plan, rank, free, trainer))
        return report_error(events, error)
    finally:
        events.close()
    return EXIT_OK


def report_error(events: EventWriter, error: Exception) -> int:
    """Write the ``error`` event; the exit status says whether the cause is a lost peer."""
    peer_lost = any(message in str(error) for message in PEER_LOST_MESSAGES)
    if isinstance(error, MeshwrightError):
        text, problems = f"{error}\n", [problem.as_dict() for problem in error.problems]
        status = error.exit_status
    else:
        text, problems = traceback.format_exc(), []
        status = EXIT_PEER_LOST if peer_lost else EXIT_ERROR
    memory = error.memory if isinstance(error, OutOfMemoryRunError) else None
    events.write(
        "error",
        message=str(error),
        kind=type(error).__name__,
        problems=problems,
        peer_lost=peer_lost,
        memory=memory,
    )
    os.write(2, text.encode())
    return status
