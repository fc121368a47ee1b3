"""The supervisor of the ranks of one layout: starts them through agents; after a failure they regroup.

A failure of one rank ends the *generation*: all ranks leave their collectives and report. Then the policy
decides. Either all ranks join a new generation, with a new process for each one that ended, from the newest
step of which every rank has a snapshot. Or the run fails with the error of the rank that failed first. If the
agent of a node is lost, its ranks and their snapshots are, too; the run waits for another agent to join.
``elastic.preemption`` adds nodes that leave; ``elastic.supervisor`` other layouts, and stragglers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.errors import Problem, RunFailedError, UserError
from meshwright.core.events import EVENTS_FILE, Event, EventWriter, warn
from meshwright.core.flight_ring import FlightMemory, RemoteFlight
from meshwright.elastic.failure_report import (
    FailureReport,
    describe_missing_nodes,
    report_lost_node,
    report_wrong_call,
)
from meshwright.elastic.hang import WRONG_CALLS, Verdict
from meshwright.elastic.layout_change import StateSource
from meshwright.elastic.policy import Budget, Failure, decide
from meshwright.elastic.quorum import Quorum
from meshwright.elastic.rank_starter import LOGS, RankStarter
from meshwright.elastic.rank_view import RankView, State, first_failed
from meshwright.elastic.rank_watch import RankWatch
from meshwright.elastic.recovery import Recovery
from meshwright.elastic.settings import SupervisorSettings
from meshwright.elastic.written_events import WrittenEvents
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.caught_signals import caught_signals
from meshwright.launch.channel import Message
from meshwright.launch.environment import RELAYED_STORE
from meshwright.launch.exits import EXIT_OK
from meshwright.launch.local import LocalAgent
from meshwright.launch.placement import Placement
from meshwright.launch.rank_process import RankCommand
from meshwright.launch.snapshot_slots import newest_common_step
from meshwright.launch.store_server import StoreServer

ADOPT_WAIT_S = 15.0
"""How long a new supervisor waits for the agents of other nodes whose ranks it adopts."""
LOCAL_START_S = 60.0
"""How long to wait for a new agent on this machine."""
POLL_S = 0.5
"""Interval of looking at signals and deadlines, when no message arrives."""


@dataclass
class RankSupervisor(SupervisorSettings):
    """Runs all ranks of one layout, on the nodes of its agents."""

    def __post_init__(self) -> None:
        self.state = State.WAITING
        self.saved = False
        """Whether there was an event of a checkpoint."""
        self._ranks = [RankView(rank, alive=False) for rank in range(self.world_size)]
        self._joined: set[int] = set()
        self._failures: list[Failure] = []
        self._ending = ""
        """Why the run does not go on, when it has failed."""
        self._deadline = float("inf")
        """When ranks that did not leave the generation are killed, or no longer waited for an agent."""
        self._members: frozenset[int] = frozenset()
        """Nodes of the last generation whose ranks were all ready."""
        self._ready: set[int] = set()
        """Nodes whose agent can start ranks, or was adopted with them."""
        self._store = StoreServer()
        self._relayed = EventWriter(self.run_dir / EVENTS_FILE, 0)
        """Appends the events of other nodes."""
        self._written = WrittenEvents(self.run_dir / EVENTS_FILE)
        self._recovery: Recovery | None = None
        """The newest; until all repeated steps are done."""
        self._store_dir = ""
        self._min_position = 0
        """Samples that a rollback skips."""
        self._outcome = ""
        """``complete`` or ``interrupted``, when rank 0 has finished."""
        self._snapshots: dict[int, dict[str, list[int]]] = {}
        """The snapshots that each node has, while the ranks regroup: steps by rank."""
        self._recorders = RankWatch(self.heartbeat_timeout_s)
        self._hang: Verdict | None = None
        """The last hang of this generation."""
        self._unresponsive: dict[int, Verdict] = {}
        """Why the process of a rank is to be fenced or killed in this generation. Until the agent has done
        it, further hangs may be found."""
        self._first_generation = self.generation
        """The first generation of this layout."""

    def run(self) -> list[int]:
        """Run to the end; returns the signals that stopped it, in order.

        Raises:
            RunFailedError: With the failed rank, its exit status and its last event.
        """
        (self.run_dir / LOGS).mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            self._stop = stack.enter_context(caught_signals(self._show_waits))
            self._stop += self.stops
            stack.callback(self._recorders.close)
            stack.callback(self._relayed.close)
            self._agents = self.agents or AgentPool(
                LocalAgent.start(self.preload),
                self.placement or Placement.in_order(self.world_size, self.world_size),
            )
            stack.callback(self._close_agents)
            self._starter = RankStarter(
                self.entry,
                self.run_dir,
                self.world_size,
                self.environment,
                keep_snapshots=self.budget.restarts > 0,
                agents=self._agents,
                layout_generation=self._first_generation,
            )
            for rank in self._ranks:
                rank.alive = self.adopts  # until the agents report which ones have ended
            if self.adopts:
                self._members = self._agents.placement.nodes
            if self._agents.count > 1:
                self._deadline = time.monotonic() + (ADOPT_WAIT_S if self.adopts else self.join_timeout_s)
            self._begin()
            self._watch()
            self._end()
        if self.state is not State.CHANGING and not self._stop:
            self._raise_failure()
        return list(self._stop)

    def _begin(self) -> None:
        """Called before the first message."""

    def _end(self) -> None:
        """Called when all ranks have ended."""

    def _close_agents(self) -> None:
        self._agents.close(ok=self.state is State.FINISHED)

    def _raise_failure(self) -> None:
        failed = [rank for rank in self._ranks if rank.failed]
        if failed:
            raise RunFailedError(self._report_on(first_failed(failed)).problem(time.time()))
        if self.state is State.FAILED:  # before a rank was started
            raise RunFailedError(Problem("run-node-lost", f"the run cannot go on: {self._ending}"))

    def count_alive(self) -> int:
        """Ranks that have a process; may be called in another thread."""
        return sum(rank.alive for rank in self._ranks)

    def _watch(self) -> None:
        """Handle messages, signals and deadlines until all ranks have exited."""
        stops_sent = 0
        ended = (State.FAILED, State.FINISHED, State.CHANGING)
        while self.state not in ended or any(rank.alive for rank in self._ranks):
            for message in self._agents.wait(max(0.0, min(POLL_S, self._deadline - time.monotonic()))):
                getattr(self, f"_on_{message['is']}")(message)
            if time.monotonic() >= self._deadline and self.state is State.WAITING:
                self._handle_missing_nodes()
            elif time.monotonic() >= self._deadline:
                self._deadline = float("inf")
                self._end_late_ranks()
            if len(self._stop) > stops_sent:
                stops_sent = len(self._stop)
                self._forward_stop(stops_sent)
            if self.state in (State.STARTING, State.RUNNING, State.REGROUPING):
                self._find_hang()
            self._let_nodes_leave()
            if self.state is State.RUNNING and self._recovery is None and not self._stop:
                self._use_new_devices()

    def _end_late_ranks(self) -> None:
        """Kill the ranks that did not leave the generation; those without an agent are gone."""
        late = [rank for rank in self._ranks if self._is_late(rank)]
        self._signal(signal.SIGKILL, late)
        for node in {self._agents.node_of(rank.rank) for rank in late} - self._agents.nodes:
            self._on_agent_lost({"node": node})

    def _let_nodes_leave(self) -> None:
        """Called in every iteration of the supervisor's loop."""

    def _use_new_devices(self) -> None:
        """Called in every iteration of the supervisor's loop while the ranks train."""

    def _find_hang(self) -> None:
        """Report a new hang. A process that does not answer loses its rank; a wrong call ends the run."""
        found = self._recorders.poll()
        if found is None or found.cause in ("ended", "raised"):  # the agent reports these
            return
        self._hang = found
        self._write_event("hang", **found.as_dict())
        if found.rank is None or not found.ends_run:
            return
        rank = self._ranks[found.rank]
        if found.cause not in WRONG_CALLS:
            self._unresponsive[rank.rank] = found
            if self.fences_unresponsive:
                self._agents.send(rank.rank, {"do": "fence", "rank": rank.rank})
            else:
                self._signal(signal.SIGKILL, [rank])
            return
        rank.failure = report_wrong_call(found, self.run_dir / LOGS, self.saved)
        rank.failed_at = time.monotonic()
        self._send_command(rank, RankCommand("halt", self.generation))
        self._halt()

    def _on_recorder(self, message: Message) -> None:
        if message["node"] != 0:
            self._recorders.add(message["rank"], RemoteFlight())
            return
        with contextlib.suppress(OSError):
            self._recorders.add(message["rank"], FlightMemory.open(message["path"]))

    def _on_watch(self, message: Message) -> None:
        self._recorders.receive(message)

    def _on_request(self, message: Message) -> None:
        """A rank uses the rendezvous store."""
        for rank, reply in self._store.handle(message["rank"], message):
            self._agents.send(rank, {"do": "reply", "rank": rank, "reply": reply})

    def _show_waits(self) -> None:
        """Answer SIGQUIT: what the run waits for now."""
        self._notify({"event": "hang", **self._recorders.judge().as_dict()})

    def _is_late(self, rank: RankView) -> bool:
        return rank.alive and (self.state in (State.FAILED, State.CHANGING) or not rank.has_left_generation)

    def _on_hello(self, message: Message) -> None:
        """The agent of a node can start ranks."""
        node = message["node"]
        self._ready.add(node)
        if node == 0:
            self._store_dir = message["store_dir"]
            if self.orphan_s:
                configure = {"do": "configure", "run_dir": str(self.run_dir), "orphan_s": self.orphan_s}
                self._agents.send_to_node(node, configure)
        self._go_on_if_complete()

    def _go_on_if_complete(self) -> None:
        """Start the ranks, or let them regroup, when all nodes are there."""
        if self.state is not State.WAITING or not self._agents.placement.nodes <= self._ready:
            return
        self._deadline = float("inf")
        if self._recovery is not None:
            self._snapshots = {}
            for node in self._agents.placement.nodes:
                self._agents.send_to_node(node, {"do": "list_snapshots"})
        else:
            self._start_ranks()

    def _start_ranks(self) -> None:
        """Start all ranks of the first generation."""
        self.state = State.STARTING
        self._store.begin(self.generation)
        for rank in self._ranks:
            self._starter.start(rank, self._join_command())

    def _on_node_joined(self, message: Message) -> None:
        joined, nodes = len(self._agents.nodes), self._agents.count
        self._write_event(
            "node_joined", node=message["node"], host=message["host"], joined=joined, nodes=nodes
        )

    def _on_node_spare(self, message: Message) -> None:
        """An agent waits to take over the next node that is lost."""
        self._write_event("node_spare", host=message["host"])

    @property
    def quorum(self) -> Quorum:
        """The nodes of the last committed generation, and those of them that are connected."""
        return Quorum.count(self._members, self._agents.nodes)

    def _on_node_refused(self, message: Message) -> None:
        """A node does not reach the data or the checkpoints."""
        problems = [Problem.from_dict(facts) for facts in message["problems"]]
        if not self._members and self._recovery is None:  # no generation has trained yet
            raise UserError(*problems)
        self._write_event("node_refused", node=message["node"], reason=str(problems[0]))

    def _on_stop(self, message: Message) -> None:
        """The command on another node received a signal."""
        self._stop.append(signal.SIGTERM)

    def _handle_missing_nodes(self) -> None:
        """The agents of some nodes did not join in time."""
        self._deadline = float("inf")
        missing = sorted(self._agents.placement.nodes - self._ready)
        reason = self.budget.explain_missing_node()
        if self._recovery is not None and 0 in missing:
            self._give_up(f"no agent started on this machine within {LOCAL_START_S:g} s")
        elif self._recovery is not None and self.quorum.holds:
            self._lose_devices(reason)
        elif self._recovery is not None:
            self._give_up(f"{reason}; {self.quorum.explain()}")
        elif self.adopts:
            self._agents.end_adoption()
            self.state = State.RUNNING
            for node in missing:
                self._on_agent_lost({"node": node})
        else:
            joined, count = len(self._ready), self._agents.count
            raise RunFailedError(
                describe_missing_nodes(joined, count, self.join_timeout_s, self._agents.refused)
            )

    def _lose_devices(self, reason: str) -> None:
        """The devices of some nodes are lost."""
        self._give_up(reason)

    def _on_node(self, node: int) -> list[RankView]:
        return [rank for rank in self._ranks if self._agents.node_of(rank.rank) == node]

    def _on_adopted(self, message: Message) -> None:
        """Take over ranks that run. Those that ended meanwhile are reported next."""
        if message["node"] == 0:
            self._store_dir = message["store_dir"]
        self._ready.add(message["node"])
        self.generation = max(self.generation, message["generation"])
        self._write_event("adopted", pid=os.getpid(), ranks=sorted(message["ranks"]))
        if self._agents.placement.nodes <= self._ready:
            self._agents.end_adoption()
            self._agents.allow_redial(True)
            self._store.begin(self.generation)
            self.state, self._deadline = State.RUNNING, float("inf")

    def _join_command(self, restore_step: int | None = None, resume_from: str | None = None) -> RankCommand:
        store = f"{self._store_dir}/generation-{self.generation}" if self.world_size > 1 else None
        if self._agents.count > 1:
            store = RELAYED_STORE
        command = RankCommand("join", self.generation, store, restore_step, resume_from)
        return replace(command, min_position=self._min_position)

    def _on_event(self, message: Message) -> None:
        rank, event = self._ranks[message["rank"]], message["event"]
        rank.last_event = event
        self.saved |= event["event"] in ("checkpoint", "resumed")
        if not (message.get("again") and event in self._written):  # by the previous supervisor
            if message["node"] != 0:
                self._relayed.relay(event)
            self._notify(event)
        if event["event"] == "step":
            self._note_step(event)
        if event["event"] == "finished" and rank.rank == 0:
            self._outcome = event["status"]
        if event["event"] == "ready":
            rank.peak_flops_per_s = event["peak_flops_per_s"]
        if event["event"] == "ready" and event["generation"] == self.generation:
            self._joined.add(rank.rank)
            if self._recovery is not None:
                self._recovery.note_setup(rank.rank, event["setup_s"])
            waiting = self.state in (State.STARTING, State.REGROUPING)  # no rank has failed since
            if waiting and len(self._joined) == self.world_size:
                self._resume_running(event["step"])

    def _note_step(self, event: Event) -> None:
        """A rank has done a step."""
        self.furthest_step = max(self.furthest_step, event["step"])
        replayed = None if self._recovery is None else self._recovery.note_step(event["step"])
        if replayed is not None:
            self._recovery = None
            self._write_event("replayed", **replayed)

    def _resume_running(self, step: int) -> None:
        """All ranks are ready to train from a step."""
        if self.state is State.REGROUPING and self._recovery is not None:
            recovered = self._recovery.finish(step)
            self._write_event("recovered", **recovered)
            if not recovered["replayed_steps"]:
                self._recovery = None
        self.state = State.RUNNING
        self._agents.allow_redial(True)
        self._members = self._agents.placement.nodes
        if self.spares:  # the first ones, or those that replaced ranks
            self._starter.keep_spares(self.spares)

    def _on_failed(self, message: Message) -> None:
        rank = self._ranks[message["rank"]]
        if message["generation"] == self.generation and rank.failure is None:
            rank.failure, rank.failed_at = message, time.monotonic()
            self._halt()

    def _on_exited(self, message: Message) -> None:
        rank = self._ranks[message["rank"]]
        rank.alive, rank.exit_status = False, message["status"]
        self._store.forget(rank.rank)
        if rank.failure is None:
            rank.failed_at = time.monotonic()
        if self.state is State.CHANGING:
            return
        if rank.exit_status != EXIT_OK or self.state is State.HALTING:
            self._halt()
        elif all(rank.exit_status == EXIT_OK for rank in self._ranks):
            self._finish()

    def _finish(self) -> None:
        """All ranks have ended as they should."""
        self.state = State.FINISHED

    def _on_fenced(self, message: Message) -> None:
        if message["generation"] < self.generation:
            return  # it was sent again: the rank has another process since
        rank = self._ranks[message["rank"]]
        rank.alive, rank.fenced, rank.failed_at = False, True, time.monotonic()
        self._halt()

    def _on_rejoined(self, message: Message) -> None:
        """A fenced process woke up and has left its generation."""
        fields = ("former_rank", "former_pid", "pid")
        self._write_event("rejoined", **{name: message[name] for name in fields})

    def _halt(self) -> None:
        """End the generation; decide when all ranks have left it."""
        if self.state in (State.FAILED, State.WAITING, State.CHANGING):
            return
        if self.state is not State.HALTING:
            self.state = State.HALTING
            self._recovery = self._begin_recovery()
            self._deadline = time.monotonic() + self.stop_grace_s
            self._agents.allow_redial(False)
            for rank in self._ranks:
                if not rank.has_left_generation:
                    self._send_command(rank, RankCommand("halt", self.generation))
        if all(rank.has_left_generation for rank in self._ranks):
            self._decide()

    def _begin_recovery(self) -> Recovery:
        first = first_failed([rank for rank in self._ranks if rank.failed])
        age_s = self._recorders.age_s(first.rank)
        waited_s = time.monotonic() - first.failed_at
        return Recovery(first.failed_at, None if age_s is None else max(0.0, age_s - waited_s))

    def _decide(self) -> None:
        first = first_failed([rank for rank in self._ranks if rank.failed])
        self._find_wrong_call(first)
        report = self._report_on(first)
        device = str(self._agents.placement.devices[first.rank])
        failure, how = replace(report.classify(), device=device), report.how()
        decision = decide(failure, self._failures, Budget() if self._stop else self.budget)
        self._failures.append(failure)
        self._deadline = float("inf")
        if decision.action == "give up":
            self._give_up(decision.reason)
            return
        self._min_position = max(self._min_position, (first.failure or {}).get("rollback_position") or 0)
        assert self._recovery is not None, "it began with the failure"
        self._recovery.note_halted(first.rank, how)
        self._write_event("rank_lost", failed_rank=first.rank, how=how, reason=decision.reason)
        if decision.action == "exclude":
            self._exclude(first.rank, decision.reason)
            return
        self.state, self._deadline = State.WAITING, time.monotonic() + self.budget.waits_for_node_s
        if 0 not in self._agents.nodes:
            self._agents.add(0, LocalAgent.start(self.preload))
            self._deadline = max(self._deadline, time.monotonic() + LOCAL_START_S)
        self._go_on_if_complete()

    def _exclude(self, rank: int, reason: str) -> None:
        """Go on without the device of a rank; all ranks have left the generation."""
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Let the ranks exit: the run has failed."""
        self.state, self._ending = State.FAILED, reason
        self._deadline = time.monotonic() + self.stop_grace_s
        for rank in self._ranks:
            if rank.alive:
                self._send_command(rank, RankCommand("exit", self.generation))

    def _find_wrong_call(self, first: RankView) -> None:
        """Find out whether a rank failed because of a wrong call: gloo aborts the process."""
        if self._hang is None and not first.lost_peer:
            found = self._recorders.judge(exits={first.rank: self._report_on(first).how()})
            if found.cause == "mismatch":
                self._hang = found
                self._write_event("hang", **found.as_dict())

    def _on_snapshots(self, message: Message) -> None:
        """Regroup when all nodes have answered: every rank joins the next generation."""
        nodes = self._agents.placement.nodes
        if self.state is not State.WAITING or message["node"] not in nodes:
            return
        self._snapshots[message["node"]] = message["steps"]
        if not nodes <= self._snapshots.keys() or not nodes <= self._ready:
            return
        steps = {int(rank): kept for node in nodes for rank, kept in self._snapshots[node].items()}
        restore_step = newest_common_step(steps, self.world_size)
        resume_from = self.find_checkpoint() if restore_step is None else None
        self.generation += 1
        self._join_from(StateSource(restore_step, resume_from))

    def _join_from(self, source: StateSource) -> None:
        """Let all ranks join the generation and load their state; start those that have no process."""
        self._hang, self._unresponsive = None, {}
        self._store.begin(self.generation)
        command = self._join_command(source.snapshot_step, source.checkpoint)
        command = replace(command, reshard_from=source.reshard_from)
        self.state, self._joined = State.REGROUPING, set()
        assert self._recovery is not None, "it began with the failure"
        # Before the commands: a rank may begin its part of the recovery while others are still told.
        self._recovery.note_ordered(source.name, self.furthest_step)
        for rank in self._ranks:
            alive = rank.alive
            rank.alive, rank.exit_status, rank.fenced, rank.failure = True, None, False, None
            if alive:
                self._send_command(rank, command)
            else:
                self._starter.start(rank, command)

    def _send_command(self, rank: RankView, command: RankCommand) -> None:
        self._agents.send(rank.rank, {"do": "command", "rank": rank.rank, "command": command.as_dict()})

    def _signal(self, number: int, ranks: Sequence[RankView]) -> None:
        for rank in ranks:
            self._agents.send(rank.rank, {"do": "signal", "rank": rank.rank, "number": number})

    def _forward_stop(self, stops_sent: int) -> None:
        """First signal: the ranks stop after their step. Second: they are killed."""
        if self.state is State.WAITING:  # the ranks wait, too
            self._give_up("a signal stopped it")
            return
        self._signal(signal.SIGTERM if stops_sent == 1 else signal.SIGKILL, self._ranks)
        if stops_sent == 1:
            self._notify({"event": "stopping", "rank": 0})

    def _on_agent_lost(self, message: Message) -> None:
        """The agent of a node is gone, and its ranks with it."""
        node, now = message["node"], time.monotonic()
        self._ready.discard(node)
        before, quorum = Quorum.count(self._members, {*self._agents.nodes, node}), self.quorum
        if before.holds and not quorum.holds:
            nodes = {"present": sorted(quorum.present), "members": sorted(quorum.members)}
            self._write_event("minority", reason=quorum.explain(), **nodes)
        cannot_start = self.state is State.WAITING and node == 0
        for rank in self._on_node(node):
            rank.peak_flops_per_s = None  # another machine may replace it
            if rank.alive or cannot_start:
                rank.alive, rank.failed_at = False, now
                rank.failure = report_lost_node(self._agents.name(node))
        if cannot_start:
            self._give_up("another one could not be started")
        elif node not in self._agents.placement.nodes:
            return
        elif self.state is State.WAITING and self._recovery is not None:
            self._deadline = min(self._deadline, now + self.budget.waits_for_node_s)
        elif any(rank.failed for rank in self._ranks):
            self._halt()

    def _write_event(self, name: str, **fields: Any) -> None:
        """Write an event of the supervisor."""
        events = EventWriter(self.run_dir / EVENTS_FILE, 0, self.generation, self._notify)
        events.write(name, **fields)
        events.close()

    def _notify(self, event: Event) -> None:
        """Call the listener; its errors must not end a run."""
        try:
            self.listener(event)
        except Exception as error:
            warn(f"an event could not be shown ({error!r}): {event}")

    def _report_on(self, rank: RankView) -> FailureReport:
        node = self._agents.node_of(rank.rank)
        return FailureReport(
            rank,
            self._unresponsive.get(rank.rank, self._hang),
            self.world_size,
            self.furthest_step,
            node,
            host=socket.gethostname() if node == 0 else self._agents.name(node),
            log=self._starter.log(rank.rank),
            saved=self.saved,
            reason=self._ending,
        )
