"""What the ranks of a pipeline send each other, in an order that follows from the schedule alone.

Between two ranks, results arrive in the order in which the sender makes them (``Ranks.channel``). A rank
knows the whole schedule, so it posts its receives in that order, one ahead of what it is about to do: the
next result travels while the rank computes. Nobody waits to send. What was sent is kept until the rank gets
something that the receiver made after it had used it: then the transfer is over for certain, and waiting for
it takes no time.

On a GPU the first steps post no receive ahead. A receive is a kernel that waits on the device; whatever is
new there, a kernel that is loaded, a library's handle, waits for it to end, and the other rank for this one.

Sends and receives are single calls, not batches: batched ones of a group share one queue under NCCL, where a
receive that is posted ahead would hold up the rank's own sends.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.mesh import Mesh
from meshwright.schedule.pipeline.actions import Action, PipelineSchedule
from meshwright.schedule.pipeline.transfers import find_releases, list_needed, receiver_of

WARMUP_STEPS = 2
"""Steps after which a GPU has everything that a step needs."""


class P2PExchange:
    """One rank's side of all transfers of a step."""

    def __init__(
        self, schedule: PipelineSchedule, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Read the order of sends and receives off the schedule.

        Args:
            schedule: One that is proved.
            mesh: Of all of them, this one.
            shape: Of every tensor that is sent.
            dtype: Its type.
        """
        self._mesh, self._shape, self._dtype = mesh, shape, dtype
        pp_rank = mesh.pp_rank
        self._incoming = {
            peer: [action for action in row if receiver_of(action, schedule) == pp_rank]
            for peer, row in enumerate(schedule.ranks)
            if peer != pp_rank
        }
        """What each peer sends here, in its order."""
        self._needed = [(schedule.rank_of(s.stage), s) for s in list_needed(schedule, pp_rank)]
        """What this rank's actions wait for, in their order."""
        self._target = {
            action: peer
            for action in schedule.ranks[pp_rank]
            if (peer := receiver_of(action, schedule)) is not None
        }
        self._releases = find_releases(schedule, pp_rank)
        self._begun = 0
        self._unposted: dict[int, deque[Action]] = {}
        self._ahead: deque[tuple[int, Action]] = deque()
        self._posted: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._sent: dict[Action, tuple[Tensor, dist.Work]] = {}

    def begin(self) -> None:
        """A step begins: the first receive is posted."""
        self._begun += 1
        self._unposted = {peer: deque(actions) for peer, actions in self._incoming.items()}
        self._ahead = deque(self._needed)
        self._post_ahead()

    def receive(self, source: Action) -> Tensor:
        """What another rank's action made; waits for it."""
        if source not in self._posted:
            self._post_next()
        buffer, work = self._posted.pop(source)
        self._ahead.popleft()
        work.wait()
        for action in self._releases.get(source, ()):
            self._sent.pop(action)[1].wait()
        self._post_ahead()
        return buffer

    def send(self, action: Action, result: Tensor) -> None:
        """Begin to send what an action of this rank made, to whoever needs it."""
        target, pp_group = self._target[action], self._mesh.pp_group
        group = pp_group(self._mesh.pp_rank, target)
        result = result.contiguous()
        work = dist.isend(result, group=group, group_dst=target)
        assert work is not None, "this rank is in the group"
        self._sent[action] = (result, work)

    def sends(self, action: Action) -> bool:
        """Whether what an action makes goes to another rank."""
        return action in self._target

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for _, work in self._sent.values():
            work.wait()
        self._sent = {}

    def _post_ahead(self) -> None:
        """Post the next receive before it is needed, unless the device is new to this."""
        if self._mesh.device.type != "cuda" or self._begun > WARMUP_STEPS:
            self._post_next()

    def _post_next(self) -> None:
        """Post the next receive, and those that come before it on the same way."""
        if not self._ahead:
            return
        peer, source = self._ahead[0]
        while source not in self._posted:
            action = self._unposted[peer].popleft()
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._mesh.device)
            group = self._mesh.pp_group(peer, self._mesh.pp_rank)
            work = dist.irecv(buffer, group=group, group_src=peer)
            assert work is not None, "this rank is in the group"
            self._posted[action] = (buffer, work)


def connect_pp_groups(schedule: PipelineSchedule, mesh: Mesh) -> None:
    """Every rank sends one number to each rank that it will send results to, all in one order.

    NCCL makes the way between two ranks when they first use it, and each waits there for the other. Receives
    that are posted ahead would wait on different ways, for ever.
    """
    pairs = {
        (home, peer)
        for a, (home, _) in schedule.positions.items()
        if (peer := receiver_of(a, schedule)) is not None
    }
    number = torch.zeros(1, device=mesh.device)
    for source, target in sorted(pairs):
        group = mesh.pp_group(source, target)
        if mesh.pp_rank == source:
            dist.send(number, group=group, group_dst=target)
        elif mesh.pp_rank == target:
            dist.recv(number, group=group, group_src=source)
