"""The supervisor of a run: changes its layout when devices are lost or come back, and handles stragglers.

The ranks of one layout are started and regrouped by ``elastic.rank_supervisor``. If devices are lost for good
and the layout may change, all ranks end, and the caller starts another supervisor with the same agents
(``elastic.layout_change``). If devices come back, or a straggler is left out, the ranks save a checkpoint
first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshwright.core.events import Event
from meshwright.elastic.layout_change import LayoutChange, RetiredSteps, StateSource
from meshwright.elastic.preemption import PreemptionSupervisor
from meshwright.elastic.rank_view import State
from meshwright.elastic.recovery import Recovery
from meshwright.elastic.straggler_policy import StragglerEvent
from meshwright.launch.channel import Message
from meshwright.launch.rank_process import RankCommand


@dataclass
class Supervisor(PreemptionSupervisor):
    """Runs a job until it ends, or goes on in another layout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.change: LayoutChange | None = None
        """The next layout, if the run goes on in another one."""
        self._dropped = False
        self._loaded = True
        """Whether all ranks of this layout have loaded their state."""
        self._retired: dict[int, RetiredSteps] = {}
        """What each node has left of the previous layout."""

    def _begin(self) -> None:
        """Begin with the agents of the previous layout, whose ranks have ended."""
        if self.earlier is None:
            return
        change, self._loaded = self.earlier.change, False
        self._ready, self._store_dir, self._members = set(change.ready), change.store_dir, change.members
        self._recovery, self._min_position = change.recovery, change.min_position
        self._failures, self._leaving = list(change.failures), set(change.leaving)
        self._deadline = time.monotonic() + self.budget.waits_for_node_s  # one may be lost since
        self._go_on_if_complete()

    def _go_on_if_complete(self) -> None:
        """Until all ranks have loaded their state, collect first what the previous layout has left."""
        if self.layouts is not None and not self._has_all_devices():
            return
        if self.earlier is None or self._loaded:
            super()._go_on_if_complete()
        elif self.state is State.WAITING and self._agents.placement.nodes <= self._ready:
            self._deadline, self._retired = float("inf"), {}
            message: Message = {"do": "begin_layout", "generation": self._first_generation}
            idle = 0 not in self._agents.placement.nodes
            for node in self._agents.nodes:  # idle ones, too: they have snapshots
                own = {"others_train": idle} if node == 0 else {"files": dict(self.earlier.files)}
                self._agents.send_to_node(node, {**message, **own})

    def _has_all_devices(self) -> bool:
        """Whether no device of the layout is lost or left out."""
        assert self.layouts is not None, "the layout may change"
        available = self.layouts.devices.available(self._ready, time.monotonic())
        return set(self._agents.placement.devices) <= available

    def _on_retired(self, message: Message) -> None:
        """A node has kept the snapshots of a layout before. After the last one, start the ranks."""
        nodes = self._agents.placement.nodes
        late = message["generation"] != self._first_generation  # the answer to the previous layout
        if self.earlier is None or self._loaded or late or self.state is not State.WAITING:
            return
        steps = {int(rank): kept for rank, kept in message["steps"].items()}
        self._retired[message["node"]] = RetiredSteps(message["retired_from"], steps)
        if not (nodes <= self._retired.keys() and nodes <= self._ready):
            return
        if any(rank.exit_status is not None or rank.failure is not None for rank in self._ranks):
            self.generation += 1  # ranks of this layout failed before they had loaded their state
        self._join_from(self.earlier.choose_state(self._retired))

    def _join_from(self, source: StateSource) -> None:
        for rank in self._ranks:
            if rank.replaced:
                self._handle_stragglers(self.stragglers.note_replaced(rank.rank, self.furthest_step))
                rank.replaced = False
        super()._join_from(source)

    def _resume_running(self, step: int) -> None:
        """All ranks have loaded their state."""
        super()._resume_running(step)
        if not self._loaded:
            self._loaded = True
            self._agents.broadcast({"do": "drop_retired"})

    def _note_step(self, event: Event) -> None:
        super()._note_step(event)
        if self.adopts and not self._dropped:  # the previous command may have died while ranks loaded
            self._dropped = True
            self._agents.broadcast({"do": "drop_retired"})
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
                self._exclude_straggler(rank.rank, one.fields["phase"])

    def _exclude_straggler(self, rank: int, phase: str) -> None:
        """Save a checkpoint and go on without the device of a straggler, if there is a layout.

        If its network link is slow, without all devices of its node.
        """
        if self.layouts is None or self.layouts.next is not None or self._stop or self._departing:
            return
        device, what = self._agents.placement.devices[rank], ""
        left_out = [device]
        if phase == "communication":
            left_out = [one for one in self.layouts.devices.all if one.node == device.node]
            what = f"node {device.node}"
        for one in left_out:
            self.layouts.devices.exclude(one, time.monotonic())
        if self.layouts.shrink(self._ready, f"{what or device} is left out: rank {rank} is a straggler"):
            self._stop_after_step()
        else:
            for one in left_out:
                self.layouts.devices.include(one)

    def _use_new_devices(self) -> None:
        """If devices came back, let the ranks save a checkpoint and end after this step."""
        if self.layouts is not None and not self._departing and self.layouts.grow(self._ready):
            self._stop_after_step()

    def _choose_layout_without(self, nodes: Collection[int], reason: str) -> bool:
        return self.layouts is not None and self.layouts.shrink(self._ready - set(nodes), reason)

    def _forget_layout(self) -> None:
        if self.layouts is not None:
            self.layouts.next = None

    def _let_nodes_leave(self) -> None:
        """While the layout changes, nodes do not leave: they leave in the next layout."""
        if self.layouts is None or self.layouts.next is None:
            super()._let_nodes_leave()

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
                    self._send_command(rank, RankCommand("leave", self.generation))
        elif self.budget.on_lost_node == "give-up" or not self.layouts.devices.may_return(
            self._ready, time.monotonic()
        ):
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
            failures=tuple(self._failures),
            leaving=frozenset(self._leaving),
            plan_files=() if self.earlier is None or self._loaded else self.earlier.plan_files,
        )

    def _close_agents(self) -> None:
        """End the agents, unless the next layout uses them."""
        if self.change is None:
            super()._close_agents()
