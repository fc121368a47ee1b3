"""The supervisor of a run: changes its layout when devices are lost or come back, and handles stragglers.

The ranks of one layout are started and regrouped by ``elastic.rank_supervisor``. If devices are lost for good
and the layout may change, all ranks end, and the caller starts another supervisor with the same agents
(``elastic.layout_change``). If devices come back, or a straggler is left out, the ranks save a checkpoint
first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.events import Event
from meshwright.elastic.layout_change import LayoutChange, StateSource
from meshwright.elastic.rank_supervisor import RankSupervisor
from meshwright.elastic.rank_view import State
from meshwright.elastic.recovery import Recovery
from meshwright.elastic.straggler_policy import StragglerEvent
from meshwright.launch.channel import Message
from meshwright.launch.rank_process import Order


@dataclass
class Supervisor(RankSupervisor):
    """Runs a job until it ends, or goes on in another layout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.change: LayoutChange | None = None
        """The next layout, if the run goes on in another one."""
        self._source: StateSource | None = None
        """Where the ranks load the state of the layout before; until all of them have."""

    def _begin(self) -> None:
        """Begin with the agents of the layout before, whose ranks have ended."""
        if self.earlier is None:
            return
        change = self.earlier.change
        self._ready, self._store_dir, self._members = set(change.ready), change.store_dir, change.members
        self._recovery, self._min_position = change.recovery, change.min_position
        self._deadline = time.monotonic() + self.budget.waits_for_node_s  # one may be lost since
        self._go_on_if_complete()

    def _go_on_if_complete(self) -> None:
        """Before the first generation of a layout that follows another one, collect what that one left."""
        if self.earlier is None or self._source is not None or self.generation != self.earlier.generation:
            super()._go_on_if_complete()
        elif self.state is State.WAITING and self._agents.placement.nodes <= self._ready:
            self._deadline, self._snapshots = float("inf"), {}
            for node in self._agents.placement.nodes:
                message: Message = {"do": "begin_layout", "generation": self.generation}
                files = {} if node == 0 else {"files": dict(self.earlier.files)}
                self._agents.send_to_node(node, {**message, **files})

    def _on_retired(self, message: Message) -> None:
        """A node has kept the snapshots of the layout before. After the last one, start the ranks."""
        if self.earlier is None or message["generation"] != self.generation or self._source is not None:
            return
        self._snapshots[message["node"]] = message["steps"]
        if self.state is not State.WAITING or not self._agents.placement.nodes <= self._snapshots.keys():
            return
        steps = {node: {int(r): s for r, s in kept.items()} for node, kept in self._snapshots.items()}
        self._source = self.earlier.choose_state(steps)
        self._join_from(self._source)

    def _join_from(self, source: StateSource, reshard_from: str | None = None) -> None:
        """If ranks failed before all had loaded the state of the layout before, load it again."""
        if self.earlier is not None and self._source is not None and source.snapshot_step is None:
            source = self._source
        if self.earlier is not None and source is self._source and source.snapshot_step is not None:
            reshard_from = self.earlier.plan_file
        for rank in self._ranks:
            if rank.replaced:
                self._handle_stragglers(self.stragglers.note_replaced(rank.rank, self.furthest_step))
                rank.replaced = False
        super()._join_from(source, reshard_from)

    def _resume_running(self, step: int) -> None:
        """All ranks have loaded their state."""
        super()._resume_running(step)
        if self._source is not None:
            self._agents.broadcast({"do": "drop_retired"})
            self._source = None

    def _note_step(self, event: Event) -> None:
        super()._note_step(event)
        self._handle_stragglers(self.stragglers.feed(event))

    def _halt(self) -> None:
        """A rank failed: the devices that had come back are used later."""
        if self.layouts is not None and self.state is State.RUNNING:
            self.layouts.next = None
        super()._halt()

    def _handle_stragglers(self, found: Sequence[StragglerEvent]) -> None:
        """Write what was found; by policy, take the rank from a straggler."""
        for one in found:
            rank = self._ranks[one.fields["rank"]]
            if one.name == "straggler":
                self._write_event("straggler", host=self._report_on(rank).host, **one.fields)
            else:
                self._write_event("straggler_recovered", **one.fields)
            if one.action == "replace" and self.state is State.RUNNING:
                rank.replaced = True
                self._signal(signal.SIGKILL, [rank])
            elif one.action == "exclude" and self.state is State.RUNNING:
                self._exclude_straggler(rank.rank)

    def _exclude_straggler(self, rank: int) -> None:
        """Save a checkpoint and go on without the device of a straggler, if there is a layout."""
        if self.layouts is None or self.layouts.next is not None or self._stop:
            return
        device = self._agents.placement.devices[rank]
        self.layouts.devices.exclude(device, time.monotonic())
        if self.layouts.shrink(self._ready, f"{device} is left out: rank {rank} is a straggler"):
            self._stop_after_step()

    def _use_new_devices(self) -> None:
        """If devices came back, let the ranks save a checkpoint and end after this step."""
        if self.layouts is not None and self.layouts.grow(self._ready):
            self._stop_after_step()

    def _stop_after_step(self) -> None:
        for rank in self._ranks:
            self._order(rank, Order("stop", self.generation))

    def _lose_devices(self, reason: str) -> None:
        """Go on with the devices that are left, if the layout may change."""
        if self.layouts is None:
            super()._lose_devices(reason)
        else:
            self._change_layout(reason)

    def _exclude(self, rank: int, reason: str) -> None:
        """Go on without the device of a rank; all ranks have left the generation."""
        if self.layouts is None:
            super()._exclude(rank, reason)
            return
        device = self._agents.placement.devices[rank]
        self.layouts.devices.exclude(device, time.monotonic())
        self._change_layout(f"{device} is left out: {reason}")

    def _change_layout(self, reason: str) -> None:
        """Let all ranks end and go on with the devices that are left.

        If no layout fits them, the run waits for more devices, or fails if the policy is to give up.
        """
        assert self.layouts is not None, "the layout may change"
        known = self.layouts.missing
        if self.layouts.shrink(self._ready, reason):
            self.state, self._deadline = State.CHANGING, time.monotonic() + self.stop_grace_s
            for rank in self._ranks:
                if rank.alive:
                    self._order(rank, Order("leave", self.generation))
        elif self.budget.on_lost_node == "give-up":
            self._give_up(f"{reason}; {self.layouts.missing}")
        else:
            self.state, self._deadline = State.WAITING, time.monotonic() + self.budget.node_wait_s
            if self.layouts.missing != known:
                self._write_event("waiting_for_devices", reason=reason, missing=self.layouts.missing)

    def _end(self) -> None:
        """All ranks have ended: pass on what the next layout needs, if the run goes on in one."""
        grew = self.state is State.FINISHED and self._outcome == "interrupted"
        following = None if self.layouts is None else self.layouts.next
        if following is None or self._stop or not (grew or self.state is State.CHANGING):
            return
        recovery = self._recovery
        if recovery is None:
            recovery = Recovery(time.monotonic(), None)
            recovery.note_halted(None, f"the layout changes: {following.reason}")
        self.state = State.CHANGING
        self.change = LayoutChange(
            next=following,
            generation=self.generation,
            furthest_step=self.furthest_step,
            min_position=self._min_position,
            recovery=recovery,
            agents=self._agents,
            ready=frozenset(self._ready),
            store_dir=self._store_dir,
            members=self._members,
        )

    def _close_agents(self) -> None:
        """End the agents, unless the next layout uses them."""
        if self.change is None:
            super()._close_agents()
