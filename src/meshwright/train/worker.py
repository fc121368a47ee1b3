"""One rank, from its start to its exit status."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.checkpoint.retired_snapshots import RetiredSnapshots
from meshwright.core.errors import MeshwrightError
from meshwright.core.events import EVENTS_FILE, Commit, EventWriter, Listener
from meshwright.core.flight_ring import FLIGHT_VARIABLE
from meshwright.launch.assignment import Assignment
from meshwright.launch.environment import RELAYED_STORE
from meshwright.launch.exits import EXIT_ERROR, EXIT_OK, EXIT_PEER_LOST
from meshwright.launch.fence import FencedError
from meshwright.launch.rank_process import RankCommand, RankLink
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.measure.flight_recorder import FlightRecorder
from meshwright.parallel.abort import GroupAborter, drop_groups, keep_process_after_nccl_errors
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.parallel.relayed_store import RelayedStore
from meshwright.plan.contract import PLAN_FILE, read_plan
from meshwright.spec.execution import uses_torch_compile
from meshwright.spec.job import Job
from meshwright.train.bad_step_policy import RollbackError
from meshwright.train.build import build_trainer
from meshwright.train.compiler_import import skip_compiler_import
from meshwright.train.cpu_memory import keep_freed_memory
from meshwright.train.loop import report_collectives, train
from meshwright.train.out_of_memory import (
    OutOfMemoryRunError,
    is_out_of_memory,
    measure_free_memory,
    report_out_of_memory,
)
from meshwright.train.rank_context import RankContext
from meshwright.train.setup_times import SetupTimes
from meshwright.train.stop_signal import StopSignal
from meshwright.train.trainer import Trainer

SHARED_STORE_LIMIT_S = 1.0
"""Longest wait for a reply of the store of small values. Results do not depend on this store."""
PEER_LOST_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)
"""Messages of gloo and NCCL after another rank is lost: then this rank is not the cause."""


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

    A process that an agent started as a spare first waits until it gets a rank.

    Args:
        work: Training, a proof, or a benchmark.
        run_dir: Folder with the plan and the assignment.
        listener: Called with every event of this rank; the link to the agent, if an agent started this rank.
        store: For the rendezvous under torchrun.

    Returns:
        The exit status.
    """
    folder, stop = Path(run_dir), StopSignal()
    stop.install()
    if not isinstance(listener, RankLink):
        return _RankSession(folder, work, listener, None, stop).run(None, store) or EXIT_OK
    link = listener
    session = _RankSession(folder, work, link, link, stop)
    while True:
        command = link.wait_for_rank()
        if command.action == "exit":
            return EXIT_OK
        status = session.run(command, store)
        if status is not None:
            return status
        reset_process()
        forget_compiled_code()
        link.offer_as_spare()


@dataclass(frozen=True)
class _RankSession:
    """This process while it has a rank: over all generations, until it exits or is fenced."""

    folder: Path
    work: Callable[[Trainer], None]
    listener: Listener | None
    link: RankLink | None
    stop: StopSignal

    def run(self, first: RankCommand | None, store: dist.Store | None) -> int | None:
        """Run the rank; returns the exit status, or None if another process has taken the rank.

        After a failure of any rank, this rank waits for the supervisor's command: it joins the next
        generation, or exits.
        """
        link, rank = self.link, int(os.environ.get("RANK", "0"))
        retired = {} if first is None or first.setup is None else first.setup.retired
        assignment = Assignment.read(self.folder)
        command = first or RankCommand("join", assignment.generation)
        commit: Commit = nullcontext if link is None else link.commit
        events = EventWriter(self.folder / EVENTS_FILE, rank, command.generation, self.listener, commit)
        flight = FlightRecorder()
        recorder, host = os.environ.get(FLIGHT_VARIABLE), socket.gethostname()
        try:
            events.write(
                "started", pid=os.getpid(), host=host, torch=torch.__version__, flight_recorder=recorder
            )
            while True:
                events.generation = command.generation
                flight.start(rank, command.generation)
                reassigned = _reassign(assignment, command)
                generation = _Generation(self.folder, reassigned, command, events, flight, link, retired)
                failure = generation.run(self.work, self.stop, store)
                if failure is None:
                    flight.enter("finished")
                    return EXIT_OK
                if not failure.fields["peer_lost"]:
                    flight.note_error(f"{failure.fields['kind']}: {failure.fields['message']}")
                del generation
                if link is None:
                    return failure.write(events)
                if link.commit.is_shut:
                    return None
                command = link.report_failure(command.generation, failure.as_dict())
                if command.action == "fence":
                    return None
                if command.action == "exit":
                    return failure.write(events)
                if command.action == "leave":
                    return EXIT_OK
                reset_process()
        except FencedError:
            return None
        finally:
            flight.stop()
            events.close()


@dataclass(frozen=True)
class RankFailure:
    """Why a rank left its generation."""

    fields: dict[str, Any]
    """Fields of the ``error`` event."""
    status: int
    """Exit status, if the run ends."""

    def as_dict(self) -> dict[str, Any]:
        """For the report to the supervisor."""
        return self.fields

    def write(self, events: EventWriter) -> int:
        """Write the ``error`` event; returns the exit status."""
        events.write("error", **self.fields)
        return self.status


@dataclass(frozen=True)
class _Generation:
    """This rank in one generation: from joining the others to the end of its work, or to a failure."""

    folder: Path
    assignment: Assignment
    command: RankCommand
    events: EventWriter
    flight: FlightRecorder
    link: RankLink | None
    retired: Mapping[str, str]
    """Memory of the in-memory snapshots of the previous layout, by rank."""

    def run(
        self, work: Callable[[Trainer], None], stop: StopSignal, store: dist.Store | None
    ) -> RankFailure | None:
        """Join, build, work; returns the failure, if there was one."""
        stop.is_ordered = self._is_stopped
        counter, aborter = CollectiveCounter(self.flight), GroupAborter()
        plan, trainer, free = None, None, (0, 0)
        setup = SetupTimes(None if self.link is None else self.link.join_command_at)
        try:
            plan = read_plan(self.folder / PLAN_FILE)
            if not uses_torch_compile(plan.job):
                skip_compiler_import()
            if plan.job.cluster.device == "cpu":
                keep_freed_memory()
            counter.install()
            setup.end("start")
            if self.link is not None and plan.job.elastic.heartbeat_timeout_s > 0:
                keep_process_after_nccl_errors()
            with self._aborting(aborter):
                with nullcontext() if self.link is None else self.link.joining():
                    mesh = init_mesh(plan.job, counter, store or self._relayed_store(plan.job))
                aborter.add(mesh.transport)
                setup.end("join")
                free = measure_free_memory(plan)
                context = RankContext(
                    plan=plan,
                    assignment=self.assignment,
                    mesh=mesh,
                    counter=counter,
                    events=self.events,
                    snapshot_slots=None if self.link is None else self.link.snapshots,
                    restore_step=self.command.restore_step,
                    setup=setup,
                    commit=nullcontext if self.link is None else self.link.commit,
                    min_position=self.command.min_position,
                    retired=self._open_retired(),
                    store=store or self._shared_store(),
                )
                trainer = build_trainer(context, stop)
                work(trainer)
            destroy_mesh(mesh)
        except Exception as error:
            if plan is not None and is_out_of_memory(error):
                error = report_out_of_memory(error, plan, self.events.rank, free, trainer)
            if self.link is not None:
                self.link.commit.leave()
            if trainer is not None:
                report_collectives(trainer)
            return describe_failure(error, self._is_halted())
        finally:
            if trainer is not None:
                trainer.saver.close()
            counter.remove()
        return None

    def _aborting(self, aborter: GroupAborter) -> AbstractContextManager[None]:
        """Let the supervisor end the collectives inside."""
        if self.link is None:
            return nullcontext()
        return self.link.aborting(self.command.generation, aborter.abort)

    def _open_retired(self) -> RetiredSnapshots | None:
        """The snapshots of the previous layout, if the state is loaded from them."""
        command = self.command
        if command.reshard_from is None or command.restore_step is None:
            return None
        paths = {int(rank): path for rank, path in self.retired.items()}
        return RetiredSnapshots(
            read_plan(self.folder / command.reshard_from).job, command.restore_step, paths
        )

    def _relayed_store(self, job: Job) -> dist.Store | None:
        """The rendezvous store of a run on several nodes; None on one."""
        if self.link is None or self.command.store != RELAYED_STORE:
            return None
        timeout = timedelta(seconds=job.elastic.collective_timeout_s)
        return RelayedStore(self.link, self.command.generation, timeout)

    def _shared_store(self) -> dist.Store | None:
        """A store for small values, for ranks that have a supervisor."""
        if self.link is None:
            return None
        return RelayedStore(self.link, self.command.generation, timedelta(seconds=SHARED_STORE_LIMIT_S))

    def _is_stopped(self) -> bool:
        return self.link is not None and self.link.stopped_generation == self.command.generation

    def _is_halted(self) -> bool:
        return self.link is not None and self.link.is_halted(self.command.generation)


def _reassign(assignment: Assignment, command: RankCommand) -> Assignment:
    """The assignment in a generation."""
    resume_from = command.resume_from or assignment.resume_from
    return replace(assignment, generation=command.generation, resume_from=resume_from)


def reset_process() -> None:
    """Free what the last generation left: its process groups and its model.

    Compiled code is kept. It refers to groups by their names, which repeat, and takes parameters as inputs.
    So the next model of this rank passes its guards.
    """
    drop_groups()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_compiled_code() -> None:
    """Free compiled code before this process becomes another rank: torch keeps 8 variants of a function."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def describe_failure(error: Exception, halted: bool = False) -> RankFailure:
    """The ``error`` event of an exception; its exit status says whether the cause is a lost peer.

    Args:
        error: Printed to the rank's log.
        halted: Whether the supervisor had ended the generation.
    """
    peer_lost = halted or any(message in str(error) for message in PEER_LOST_MESSAGES)
    if isinstance(error, MeshwrightError):
        text, problems = f"{error}\n", [problem.as_dict() for problem in error.problems]
        status = error.exit_status
    else:
        text, problems = traceback.format_exc(), []
        status = EXIT_PEER_LOST if peer_lost else EXIT_ERROR
    os.write(2, text.encode())
    memory = error.memory if isinstance(error, OutOfMemoryRunError) else None
    fields = {
        "message": str(error),
        "kind": type(error).__name__,
        "problems": problems,
        "peer_lost": peer_lost,
        "memory": memory,
        "rollback_position": error.position if isinstance(error, RollbackError) else None,
    }
    return RankFailure(fields, status)
