"""Finds the ranks of this host, and opens the transport for the process groups that are all here.

Every rank announces its memory and its process in the rendezvous store before it joins. Ranks with the same
memory share a host and an agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from meshwright.core.errors import Problem, UserError
from meshwright.launch.collective_memory import MappedMemory
from meshwright.launch.environment import COLLECTIVE_MEMORY_VARIABLE
from meshwright.layout.shared_memory import list_regions
from meshwright.parallel.shared_memory import futex
from meshwright.parallel.shared_memory.channel import Peers
from meshwright.parallel.shared_memory.transport import SharedMemoryTransport
from meshwright.parallel.shared_memory.work import Observe
from meshwright.spec.execution import resolve_transport
from meshwright.spec.job import Job


class HostRanks:
    """Memory and process of each rank of a job, as announced in the store."""

    def __init__(self, job: Job, store: dist.Store, rank: int, backend: str) -> None:
        """Announce this rank. Call it before the rank joins: then all have announced after that.

        Args:
            job: The settled job.
            store: The rendezvous store.
            rank: This rank.
            backend: Backend of the process groups; ranks that use another one than gloo announce nothing.

        Raises:
            UserError: The job requires shared memory, and there is none.
        """
        self._store, self._rank, self._world_size = store, rank, job.layout.world_size
        self._timeout_s = job.elastic.collective_timeout_s
        self._memory: MappedMemory | None = None
        if backend != "gloo":
            return
        planned = resolve_transport(job) == "shared_memory"
        self._memory = _open_memory() if planned else None
        if planned and self._memory is None and job.train.transport == "shared_memory":
            raise UserError(_describe_missing_memory())
        identity = "" if self._memory is None else self._memory.identity
        store.set(_key(rank), json.dumps({"memory": identity, "pid": os.getpid()}))

    def open_transport(
        self, own: Iterable[dist.ProcessGroup], groups: Sequence[Sequence[int]], observe: Observe
    ) -> SharedMemoryTransport | None:
        """Open the transport for groups of this rank whose ranks are all here; None if there are none.

        Args:
            own: The groups of this rank, in the order in which they are created.
            groups: All groups of the job in that order, the same on every rank.
            observe: Called around what waits for other ranks.
        """
        if self._memory is None:
            return None
        announced = [json.loads(self._store.get(_key(rank))) for rank in range(self._world_size)]
        here = [r for r, a in enumerate(announced) if a["memory"] == announced[self._rank]["memory"]]
        regions = list_regions(groups)
        mine = (region for region in regions if self._rank in region.ranks)
        shared = [
            (group, region)
            for group, region in zip(own, mine, strict=True)
            if len(region.ranks) > 1 and set(region.ranks) <= set(here)
        ]
        if not shared:
            return None
        memory = self._memory.map(regions[-1].end)
        peers = Peers({rank: announced[rank]["pid"] for rank in here if rank != self._rank})
        spin = len(here) <= len(os.sched_getaffinity(0))
        transport = SharedMemoryTransport(memory, peers, self._timeout_s, observe, spin)
        for group, region in shared:
            transport.add_group(group, region)
        return transport

    def close(self) -> None:
        """Close the descriptor of the memory; a mapping stays."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _open_memory() -> MappedMemory | None:
    """The memory that the agent names; None without an agent, and on machines that lack what is needed."""
    generation, _, path = os.environ.get(COLLECTIVE_MEMORY_VARIABLE, "").partition(":")
    if not path or not futex.is_supported() or not _can_watch_processes():
        return None
    return MappedMemory.open(path, int(generation))


def _can_watch_processes() -> bool:
    """Whether the kernel has pidfds, and lets this process open one."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _describe_missing_memory() -> Problem:
    rule = "needs ranks that meshwright started (not torchrun), x86-64, and Linux with pidfd_open"
    fix = "Start the run with meshwright train, or use train.transport=auto"
    return Problem("transport-missing", rule, path="train.transport", value="shared_memory", fix=fix)


def _key(rank: int) -> str:
    return f"host/{rank}"
