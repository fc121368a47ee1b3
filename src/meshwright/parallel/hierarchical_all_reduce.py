"""Hierarchical all-reduce of gradient buckets, as a hook of DDP.

Three collectives per chunk of a bucket: reduce-scatter inside the node, all-reduce of this rank's shard
between the nodes, all-gather inside the node. Which ranks take part is read from a schedule
(``layout.hierarchy``).

A thread runs the buckets one after the other, so that all ranks call the collectives of a group in the same
order, and the backward pass goes on meanwhile. Chained futures do not give this order: with several buckets
on gloo they race.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from meshwright.layout.axes import INTER_NODE_AXIS, INTRA_NODE_AXIS
from meshwright.layout.hierarchy import Hierarchy
from meshwright.measure.flight_recorder import in_background
from meshwright.parallel.collectives import all_gather_into, reduce_scatter_into
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.shared_memory.work import Lane


class HierarchicalAllReduce:
    """All-reduces buckets in the order of the calls."""

    def __init__(self, mesh: Mesh, hierarchy: Hierarchy, buckets: Sequence[int]) -> None:
        """Allocate the buffers. The thread starts with the first bucket.

        Args:
            mesh: With the groups of the phases.
            hierarchy: The phases.
            buckets: Elements of each bucket.
        """
        self._intra_node, self._inter_node = mesh.group(INTRA_NODE_AXIS), mesh.group(INTER_NODE_AXIS)
        padded, shard = hierarchy.buffer_sizes(buckets)
        self._hierarchy = hierarchy
        self._padded = torch.zeros(padded, device=mesh.device)
        """A bucket that does not split into equal shards, with zeros at its end."""
        self._shard = torch.zeros(shard, device=mesh.device)
        self._lane = Lane("hierarchical all-reduce", _observe_nothing)
        self._flight = mesh.flight

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """The buffers, which live from step to step."""
        return self._padded, self._shard

    def start(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket over all ranks, in place."""
        if is_fake(bucket):  # a dry run: fake tensors are for one thread
            self._run(bucket)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket)
            return done
        if self._flight is not None:
            self._flight.note_issued()
        work = self._lane.submit(lambda: self._run(bucket), [bucket])
        return work.get_future().then(lambda done: done.value()[0])

    def close(self) -> None:
        """End the thread. The garbage collector calls it: a thread that waits for a lost rank ends later."""
        self._lane.close(wait_s=1.0)

    def _run(self, bucket: Tensor) -> None:
        """Sum a bucket; in the thread."""
        with in_background(), torch.no_grad():
            count, size = bucket.numel(), self._hierarchy.padded(bucket.numel())
            whole = bucket
            if size > count:
                whole = self._padded[:size]
                whole[:count].copy_(bucket)
                whole[count:].zero_()
            self._sum_chunks(whole, self._hierarchy.chunks(count))
            if size > count:
                bucket.copy_(whole[:count])

    def _sum_chunks(self, whole: Tensor, chunks: Sequence[tuple[int, int]]) -> None:
        """Sum a tensor of equal shards. One chunk is between the nodes while others are inside them."""
        shards = self._hierarchy.ranks_per_node
        pending: tuple[dist.Work, Tensor, Tensor] | None = None
        for low, high in chunks:
            chunk, shard = whole[low * shards : high * shards], self._shard[low:high]
            reduce_scatter_into(shard, chunk, group=self._intra_node)
            work = dist.all_reduce(shard, group=self._inter_node, async_op=True)
            assert work is not None, "this rank is in the group"
            if pending is not None:
                self._gather(*pending)
            pending = work, chunk, shard
        if pending is not None:
            self._gather(*pending)

    def _gather(self, work: dist.Work, chunk: Tensor, shard: Tensor) -> None:
        """Wait for the sum of this rank's shard, and all-gather the shards inside the node."""
        work.wait()
        all_gather_into(chunk, shard, group=self._intra_node)


def _observe_nothing(call: Callable[[], Any]) -> Any:
    """The waits of the collectives are observed where they are called."""
    return call()
