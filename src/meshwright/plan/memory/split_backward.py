"""Gradients of a stage under ZeRO-2 and 3 where the backward pass is split in two.

The first half (B) makes the gradients of the root group and of routed experts. The root group is reduced at
once, and so are experts that are sharded over ranks of their own. Other routed experts are in the group of
their block, which is not reduced in B: their gradients wait whole, in float32.

The second half (W) makes the weight gradients of all linear layers of the stage, whole and in float32. Then
it reduces the blocks one by one, last to first. Each fills the input of its reduce-scatter while its own
gradient and those of the blocks below are whole. That is the peak of W. Nothing is gathered for it.

With deferred gradients nothing is reduced before the last B, for the root group, and the last W.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from meshwright.plan.memory.fsdp import FSDPSizes
from meshwright.plan.memory.snapshots import MemorySnapshot
from meshwright.schedule.pipeline.in_flight import StageState, WeightGrads


@dataclass(frozen=True)
class SplitBackwardGrads:
    """Bytes of gradients, and of the inputs of reduce-scatters."""

    sizes: FSDPSizes

    @functools.cached_property
    def _early(self) -> tuple[list[int], list[int]]:
        """Sums over the last blocks of what B makes of experts: what is reduced in B, and what waits."""
        deferred, blocks = self.sizes.deferred, self.sizes.blocks[::-1]
        reduced = [0 if deferred else block.experts.shard for block in blocks]
        waiting = [block.routed + (block.experts.kept if deferred else 0) for block in blocks]
        return list(itertools.accumulate(reduced, initial=0)), list(itertools.accumulate(waiting, initial=0))

    @functools.cached_property
    def _own_shards(self) -> int:
        """Shards of the blocks' own groups."""
        return sum(block.own.shard for block in self.sizes.blocks)

    def held(self, state: StageState) -> int:
        """Between two actions of the stage."""
        sizes, (reduced, waiting) = self.sizes, self._early
        if state.grads is WeightGrads.NONE:
            return 0
        if sizes.deferred:
            return sizes.kept if state.grads is WeightGrads.ALL else sizes.kept_around + waiting[-1]
        own = self._own_shards if state.grads is WeightGrads.ALL else 0
        return sizes.around_shard + own + reduced[-1] + (waiting[-1] if state.unreduced else 0)

    def input_grads(self, snapshot: MemorySnapshot, state: StageState) -> tuple[int, int]:
        """At a moment of B, or of a forward pass: gradients, and what a reduce-scatter was given."""
        if not snapshot.backward:
            return self.held(state), 0
        sizes, layer = self.sizes, snapshot.layer
        done = sizes.layers if layer is None else sizes.layers - 1 - layer
        held = self.held(state) + self._made(done, state)
        if layer is None:
            return self._around(snapshot, held)
        block, behind = sizes.blocks[layer], sizes.blocks[layer + 1 : layer + 2]
        if snapshot.part == "experts":
            held += block.experts.reducing
        if snapshot.part in ("experts", "attention"):  # made in the precision of the GEMM
            held += block.routed if sizes.summed else block.routed // 2
        sent = block.experts.sent if snapshot.part in ("experts", "attention") else 0
        sent = sent or (behind[0].experts.sent if behind else 0)
        return held + sizes.around_early, 0 if sizes.deferred else sent

    def _made(self, blocks: int, state: StageState) -> int:
        """What B has made of the experts of the last blocks and was not there when it began."""
        reduced, waiting = (sums[blocks] for sums in self._early)
        none = state.grads is WeightGrads.NONE
        there = not none if self.sizes.deferred else state.unreduced
        return (reduced if none else 0) + (0 if there else waiting)

    def _around(self, snapshot: MemorySnapshot, held: int) -> tuple[int, int]:
        """The same for the root group, when the blocks are done."""
        sizes = self.sizes
        if snapshot.part == "around":
            return held + sizes.around_late, 0 if sizes.deferred else sizes.blocks[0].experts.sent
        whole = max(sizes.kept_around, sizes.around_last + sizes.around_shard)
        return held + whole, sizes.around_sent

    def weight_grads(self, state: StageState) -> tuple[int, int]:
        """At the peak of W: gradients, and what a reduce-scatter was given."""
        sizes = self.sizes
        if sizes.deferred and not state.last:
            return sizes.kept, 0
        reduced, _ = self._early
        held = sizes.around_shard + reduced[-1]
        if sizes.deferred:
            held += sum(block.experts.shard for block in sizes.blocks)
        added = state.grads is WeightGrads.ALL and not sizes.deferred
        whole, shards = sum(block.own.kept for block in sizes.blocks), self._own_shards if added else 0
        found = []
        for block in reversed(sizes.blocks):
            found.append((held + whole + shards, block.own.sent))
            whole -= block.own.kept
            shards += 0 if added else block.own.shard
        return max(found, key=sum)
