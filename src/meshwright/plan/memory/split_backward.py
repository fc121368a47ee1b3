"""Gradients of a pipeline stage under ZeRO-2 and 3 with a split backward pass.

The input-gradient half (B) also computes the gradients of the root group and of routed experts. The root
group is reduced at once, and so are experts with a separate shard axis. Other routed experts
belong to the group of their block, which is not reduced in B: their gradients stay unsharded, in float32.

The weight-gradient half (W) computes the weight gradients of all linear layers of the stage, unsharded and in
float32. Then it reduces the blocks one by one, last to first. Each fills the input of its reduce-scatter
while its own gradient and those of the blocks below are unsharded. That is the peak of W. Nothing is gathered
for it.

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
    """Bytes of gradients and of reduce-scatter inputs."""

    sizes: FSDPSizes

    @functools.cached_property
    def _expert_grads(self) -> tuple[list[int], list[int]]:
        """Expert gradients that B computes, summed over the last blocks: reduced in B, and left unsharded."""
        deferred, blocks = self.sizes.deferred, self.sizes.blocks[::-1]
        reduced = [0 if deferred else block.experts.shard_grad for block in blocks]
        full = [block.routed_grad + (block.experts.full_grad if deferred else 0) for block in blocks]
        return list(itertools.accumulate(reduced, initial=0)), list(itertools.accumulate(full, initial=0))

    @functools.cached_property
    def _main_shards(self) -> int:
        """Sharded gradients of the blocks' main groups."""
        return sum(block.main.shard_grad for block in self.sizes.blocks)

    def between_actions(self, state: StageState) -> int:
        """Gradients between two actions of the stage."""
        sizes, (reduced, full) = self.sizes, self._expert_grads
        if state.grads is WeightGrads.NONE:
            return 0
        if sizes.deferred:
            return sizes.grads_between if state.grads is WeightGrads.ALL else sizes.root_full_grad + full[-1]
        main = self._main_shards if state.grads is WeightGrads.ALL else 0
        return sizes.root_shard_grad + main + reduced[-1] + (full[-1] if state.unreduced else 0)

    def input_grads(self, snapshot: MemorySnapshot, state: StageState) -> tuple[int, int]:
        """Gradients and reduce-scatter inputs at a snapshot of B, or of forward."""
        if not snapshot.backward:
            return self.between_actions(state), 0
        sizes, layer = self.sizes, snapshot.layer
        done = sizes.layers if layer is None else sizes.layers - 1 - layer
        grads = self.between_actions(state) + self._new_expert_grads(done, state)
        if layer is None:
            return self._root(snapshot, grads)
        block, behind = sizes.blocks[layer], sizes.blocks[layer + 1 : layer + 2]
        if snapshot.phase == "experts":
            grads += block.experts.reduce_temp
        if snapshot.phase in ("experts", "attention"):  # computed in the precision of the GEMM
            grads += block.routed_grad if sizes.in_place else block.routed_grad // 2
        sent = block.experts.reduce_input if snapshot.phase in ("experts", "attention") else 0
        sent = sent or (behind[0].experts.reduce_input if behind else 0)
        return grads + sizes.root_early_grads, 0 if sizes.deferred else sent

    def _new_expert_grads(self, blocks: int, state: StageState) -> int:
        """Gradients of the last blocks' experts that this B has computed and that did not exist before."""
        reduced, full = (sums[blocks] for sums in self._expert_grads)
        none = state.grads is WeightGrads.NONE
        existed = not none if self.sizes.deferred else state.unreduced
        return (reduced if none else 0) + (0 if existed else full)

    def _root(self, snapshot: MemorySnapshot, grads: int) -> tuple[int, int]:
        """The same for the root group, after all blocks."""
        sizes = self.sizes
        if snapshot.phase == "root":
            sent = 0 if sizes.deferred else sizes.blocks[0].experts.reduce_input
            return grads + sizes.root_late_grads, sent
        full = max(sizes.root_full_grad, sizes.root_last_grad + sizes.root_shard_grad)
        return grads + full, sizes.root_reduce_input

    def weight_grads(self, state: StageState) -> tuple[int, int]:
        """Gradients and reduce-scatter inputs at the peak of W."""
        sizes = self.sizes
        if sizes.deferred and not state.last:
            return sizes.grads_between, 0
        reduced, _ = self._expert_grads
        grads = sizes.root_shard_grad + reduced[-1]
        if sizes.deferred:
            grads += sum(block.experts.shard_grad for block in sizes.blocks)
        exist = state.grads is WeightGrads.ALL and not sizes.deferred
        full, shards = sum(block.main.full_grad for block in sizes.blocks), self._main_shards if exist else 0
        found = []
        for block in reversed(sizes.blocks):
            found.append((grads + full + shards, block.main.reduce_input))
            full -= block.main.full_grad
            shards += 0 if exist else block.main.shard_grad
        return max(found, key=sum)
