"""Point-to-point transfers between the ranks of a pipeline, in an order that the schedule fixes.

Between two ranks, results arrive in the order in which the sender computes them (``Mesh.pp_group``). Each
rank has the whole schedule. It posts its receives in that order, one ahead of the action that it runs. So the
next result is transferred while the rank computes. Sends are asynchronous. A sent tensor is kept until the
rank receives something that the receiver computed after using it. Then the transfer is complete, and the wait
for the send returns at once.

On a GPU the first steps post no receive ahead. A receive is a kernel that waits on the device. The first load
of a kernel and the creation of a library handle wait for all running kernels, so also for this receive. The
sender would wait for this rank: a deadlock.

Sends and receives are single calls, not batched. NCCL runs batched calls of a group in one queue, where a
receive that is posted ahead would block the rank's own sends.
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
"""Steps after which a GPU has initialized everything that a step needs."""


class P2PExchange:
    """One rank's sends and receives of a step."""

    def __init__(
        self, schedule: PipelineSchedule, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Find the order of sends and receives in the schedule.

        Args:
            schedule: A proved one.
            mesh: This rank's groups.
            shape: Shape of every tensor that is sent.
            dtype: Dtype of every tensor that is sent.
        """
        self._mesh, self._shape, self._dtype = mesh, shape, dtype
        pp_rank = mesh.pp_rank
        self._incoming = {
            peer: [action for action in row if receiver_of(action, schedule) == pp_rank]
            for peer, row in enumerate(schedule.ranks)
            if peer != pp_rank
        }
        """The actions whose results each peer sends to this rank, in the peer's order."""
        self._needed = [(schedule.rank_of(s.stage), s) for s in list_needed(schedule, pp_rank)]
        """The results that this rank's actions wait for, in their order."""
        self._target = {
            action: peer
            for action in schedule.ranks[pp_rank]
            if (peer := receiver_of(action, schedule)) is not None
        }
        self._releases = find_releases(schedule, pp_rank)
        self._steps = 0
        self._unposted: dict[int, deque[Action]] = {}
        self._to_receive: deque[tuple[int, Action]] = deque()
        self._posted: dict[Action, tuple[Tensor, dist.Work]] = {}
        self._sent: dict[Action, tuple[Tensor, dist.Work]] = {}

    def begin(self) -> None:
        """Start a step: post the first receive."""
        self._steps += 1
        self._unposted = {peer: deque(actions) for peer, actions in self._incoming.items()}
        self._to_receive = deque(self._needed)
        self._prefetch()

    def receive(self, source: Action) -> Tensor:
        """Wait for the result of another rank's action."""
        if source not in self._posted:
            self._post_next()
        buffer, work = self._posted.pop(source)
        self._to_receive.popleft()
        work.wait()
        for action in self._releases.get(source, ()):
            self._sent.pop(action)[1].wait()
        self._prefetch()
        return buffer

    def send(self, action: Action, result: Tensor) -> None:
        """Start to send the result of an action to the rank that needs it."""
        target = self._target[action]
        group = self._mesh.pp_group(self._mesh.pp_rank, target)
        result = result.contiguous()
        work = dist.isend(result, group=group, group_dst=target)
        assert work is not None, "this rank is in the group"
        self._sent[action] = (result, work)

    def sends(self, action: Action) -> bool:
        """Whether the result of an action goes to another rank."""
        return action in self._target

    def finish(self) -> None:
        """End a step: wait for all sends."""
        for _, work in self._sent.values():
            work.wait()
        self._sent = {}

    def _prefetch(self) -> None:
        """Post the next receive before it is needed, except in the warm-up steps of a GPU."""
        if self._mesh.device.type != "cuda" or self._steps > WARMUP_STEPS:
            self._post_next()

    def _post_next(self) -> None:
        """Post the next receive, after those that precede it from the same peer."""
        if not self._to_receive:
            return
        peer, source = self._to_receive[0]
        while source not in self._posted:
            action = self._unposted[peer].popleft()
            buffer = torch.empty(self._shape, dtype=self._dtype, device=self._mesh.device)
            group = self._mesh.pp_group(peer, self._mesh.pp_rank)
            work = dist.irecv(buffer, group=group, group_src=peer)
            assert work is not None, "this rank is in the group"
            self._posted[action] = (buffer, work)


def connect_pp_groups(schedule: PipelineSchedule, mesh: Mesh) -> None:
    """Every rank sends one number to each rank that it will send results to, all in one order.

    NCCL connects two ranks at their first transfer, and each waits there for the other. Receives that are
    posted ahead would wait on different connections, for ever.
    """
    pairs = {
        (source, target)
        for action, (source, _) in schedule.positions.items()
        if (target := receiver_of(action, schedule)) is not None
    }
    number = torch.zeros(1, device=mesh.device)
    for source, target in sorted(pairs):
        group = mesh.pp_group(source, target)
        if mesh.pp_rank == source:
            dist.send(number, group=group, group_dst=target)
        elif mesh.pp_rank == target:
            dist.recv(number, group=group, group_src=source)
