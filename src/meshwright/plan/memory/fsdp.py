"""All-gathered parameters, gradients and reduce-scatter inputs that ZeRO-2 and 3 add to a snapshot.

Follows torch's FSDP2, eager. An all-gather writes into a buffer that is freed when the parameters are copied
out. While a block runs, the next ``prefetch`` blocks are all-gathered into such buffers. The input of a
block's reduce-scatter, its unsharded gradient as it is sent, lives until the next block's reduce-scatter.
While it is filled, the unsharded gradient is live too; the sharded gradient comes when that is freed. The
root group (embedding, final norm, head) is gathered from forward to backward, and the head's gradient,
computed with the loss, lives as long: both are in the peak. Deferred gradients stay unsharded, in float32 and
not padded, until the last micro-batch.

These bytes depend on the layer, the phase and the micro-batch alone. So they are sums over blocks at a given
snapshot, not events of the walk: only the snapshots near the ends of runs of identical blocks are evaluated.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.layout.axes import dense_shard_axis
from meshwright.layout.fsdp_groups import FsdpGroup, group_root, offloads_gradients
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, operand_bytes
from meshwright.layout.stages import StageSpec, list_stages
from meshwright.plan.memory.fsdp_blocks import BlockGroups, list_blocks
from meshwright.plan.memory.snapshots import MemorySnapshot
from meshwright.schedule.pipeline.in_flight import StageState
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class MicroBatchPass:
    """The position of a micro-batch in its step."""

    first: bool
    """There are no gradients yet; ZeRO-2 all-gathers."""
    last: bool
    """ZeRO-2 frees the gathered blocks."""


def _list_passes(micro_batches: int) -> list[MicroBatchPass]:
    """The micro-batches that differ: the first, the last, one between them."""
    if micro_batches == 1:
        return [MicroBatchPass(first=True, last=True)]
    passes = [MicroBatchPass(first=True, last=False), MicroBatchPass(first=False, last=True)]
    return passes if micro_batches == 2 else [*passes, MicroBatchPass(first=False, last=False)]


@dataclass(frozen=True)
class FSDPSizes:
    """Bytes of the FSDP groups of a model or pipeline stage."""

    blocks: tuple[BlockGroups, ...]
    zero: int
    prefetch: int
    """Blocks gathered ahead."""
    root: int
    """The root group, gathered."""
    root_reduce_input: int
    """Input of its reduce-scatter: float32, or the type of compressed gradients."""
    root_shard_grad: int
    """Its sharded gradient in float32."""
    root_last_grad: int
    """The gradient of its last parameter, which torch frees last."""
    root_early_grads: int
    """Its gradients that live through the backward of the blocks: the head's, the final norm's."""
    root_late_grads: int
    """Its gradients when the embedding's is computed."""
    deferred: bool
    """Whether gradients stay unsharded until the last micro-batch."""
    root_full_grad: int
    """Its unsharded gradients."""
    embedding_grad: int
    """The gradient of the embedding."""
    tied_grad: int
    """The head's part of a tied gradient; 0 if not tied."""
    in_place: bool
    """Whether autograd adds to existing gradients in place: those of float32 GEMMs."""

    @classmethod
    def of(cls, job: Job, part: StageSpec) -> FSDPSizes:
        """Sizes of the model, or of a stage."""
        model, ranks = part.model, dense_shard_axis(job.layout).size
        assert isinstance(model, DecoderModel), "the legality table shards decoders only"
        (group,) = group_root(part) or [FsdpGroup("nothing", (), block=False)]
        root = {p.name: p.count * FLOAT32_BYTES for p in group.parameters}
        head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
        tied = model.tied_embeddings and part.whole
        norm = sum(size for name, size in root.items() if name.startswith("norm."))
        on_device = 0 if offloads_gradients(job) else 1
        return cls(
            blocks=list_blocks(job, part),
            zero=job.layout.zero,
            prefetch=job.layout.prefetch,
            root=group.gathered_bytes(ranks, job.train.precision),
            root_reduce_input=group.padded(ranks) * WIRE_BYTES[job.compression.kind],
            root_shard_grad=on_device * group.padded(ranks) * FLOAT32_BYTES // ranks,
            root_last_grad=group.parameters[-1].count * FLOAT32_BYTES if group.parameters else 0,
            root_early_grads=head + norm if part.last else 0,
            # A tied gradient is made of two parts and their sum.
            root_late_grads=sum(root.values()) + (2 * head if tied else 0),
            deferred=job.layout.accumulate == "deferred",
            root_full_grad=sum(root.values()),
            embedding_grad=head if part.first else 0,
            tied_grad=head if tied else 0,
            in_place=operand_bytes(job.train.precision) == FLOAT32_BYTES,
        )

    @property
    def layers(self) -> int:
        """How many blocks."""
        return len(self.blocks)

    @functools.cached_property
    def _sums(self) -> dict[str, list[int]]:
        """Sums over the first blocks, by field."""
        return {
            name: list(itertools.accumulate(map(operator.attrgetter(name), self.blocks), initial=0))
            for name in ("gathered", "gather_buffer", "shard_grad", "full_grad")
        }

    def _sum(self, name: str, first: int = 0, end: int | None = None) -> int:
        """Sum over the blocks from one to before another; indices out of range count nothing."""
        sums, end = self._sums[name], self.layers if end is None else min(end, self.layers)
        return sums[end] - sums[min(max(first, 0), end)]

    @functools.cached_property
    def blocks_shard_grad(self) -> int:
        """Sharded gradients of all blocks."""
        return self._sum("shard_grad")

    @functools.cached_property
    def blocks_full_grad(self) -> int:
        """Unsharded gradients of all blocks."""
        return self._sum("full_grad")

    @property
    def grads_between(self) -> int:
        """Gradients between two micro-batches: sharded, or unsharded if deferred."""
        if self.deferred:
            return self.root_full_grad + self.blocks_full_grad
        return self.root_shard_grad + self.blocks_shard_grad

    def idle(self, state: StageState, shares_root: bool) -> int:
        """Gathered parameters of a pipeline stage while another stage runs.

        Args:
            state: What earlier passes have left.
            shares_root: Whether another stage needs its root group too.
        """
        if self.zero == 2:
            return self.root + self._sum("gathered") if state.in_use else 0
        return self.root if state.after_forward or shares_root else 0

    def gathered(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int, int]:
        """Gathered parameters at a snapshot: the root group, blocks, and all-gather buffers."""
        root, layer, reshards = self.root, snapshot.layer, self.zero == 3 or run.last
        if layer is not None and snapshot.backward and reshards:
            below = self._sum("gathered", 0, layer) if self.zero == 2 else 0
            blocks, buffers = self._gathered_in_backward(self.blocks[layer], layer, snapshot.phase)
            blocks += below
        elif self.zero == 3 and not snapshot.backward:
            blocks = self.blocks[layer].gathered if layer is not None else 0
            ahead = layer + 1 if layer is not None else self.layers
            buffers = self._sum("gather_buffer", ahead, ahead + self.prefetch)
        else:
            freed = layer is None and snapshot.backward and reshards
            root = 0 if freed and snapshot.phase == "reduced" else root
            blocks, buffers = 0 if freed else self._sum("gathered"), 0
        return root, blocks, buffers

    def _gathered_in_backward(self, block: BlockGroups, layer: int, phase: str) -> tuple[int, int]:
        """Gathered bytes of the block in its backward pass, and the buffers of prefetched ones."""
        main = block.main.gathered
        by_phase = {"reduced": 0, "experts": main, "attention": main, "last": main, "unshard": main}
        gathered = by_phase.get(phase, block.gathered)
        if self.zero == 2:
            return gathered, 0
        ahead = self._sum("gather_buffer", layer - self.prefetch, layer)
        if phase == "unshard":  # its own buffers; the farthest block ahead is not prefetched yet
            ahead = self._sum("gather_buffer", layer - max(self.prefetch - 1, 0), layer)
            ahead += block.main.gather_buffer + (block.experts.gather_buffer if self.prefetch else 0)
        elif phase == "experts unshard":
            ahead += block.experts.gather_buffer
        return gathered, ahead

    def gradients(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """Gradients, sharded and unsharded, and inputs of reduce-scatters at a snapshot."""
        if self.deferred and not (run.first and run.last):
            return self._deferred_gradients(snapshot, run)
        everything, phase = self.root_shard_grad + self.blocks_shard_grad, snapshot.phase
        if not snapshot.backward:
            return (0 if run.first else everything), 0
        if snapshot.layer is None:
            shards = self.blocks_shard_grad if run.first else everything
            if phase == "root":
                return shards + self.root_late_grads, self.blocks[0].main.reduce_input
            full = max(self.root_full_grad, self.root_last_grad + self.root_shard_grad)
            return shards + full, self.root_reduce_input
        block, behind = self.blocks[snapshot.layer], self.blocks[snapshot.layer + 1 : snapshot.layer + 2]
        shards = self._sum("shard_grad", snapshot.layer + 1) if run.first else everything
        full, sent = self._unsharded(block, phase)
        if run.first and phase in ("attention", "last", "reduced"):
            shards += block.experts.shard_grad
        if phase == "reduced":
            full = block.main.reduce_temp
        elif phase == "experts":
            full += block.experts.reduce_temp
        sent = sent or (behind[0].main.reduce_input if behind else 0)
        return shards + self.root_early_grads + full, sent

    @staticmethod
    def _unsharded(block: BlockGroups, phase: str) -> tuple[int, int]:
        """Unsharded gradients of the block in backward, and its own reduce-scatter inputs."""
        full = {
            "experts": block.ffn_grad,
            "attention": block.ffn_grad,
            "last": block.main.gathered,
            "reduced": block.main.gathered,
        }
        sent = {
            "experts": block.experts.reduce_input,
            "attention": block.experts.reduce_input,
            "last": block.experts.reduce_input,
            "reduced": block.main.reduce_input,
        }
        return full.get(phase, 0), sent.get(phase, 0)

    def _deferred_gradients(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """The same with deferred gradients: computed in the first micro-batch, reduced in the last."""
        everything, phase = self.root_full_grad + self.blocks_full_grad, snapshot.phase
        if not snapshot.backward:
            return (0 if run.first else everything), 0
        if snapshot.layer is None:
            return self._deferred_root(snapshot, run)
        block, behind = self.blocks[snapshot.layer], self.blocks[snapshot.layer + 1 : snapshot.layer + 2]
        new, sent = self._unsharded(block, phase)
        if phase == "experts":
            new += block.experts.gathered
        if run.first:
            kept = self.root_early_grads + self._sum("full_grad", snapshot.layer + 1)
        elif run.last:
            unreduced = self._sum("full_grad", 0, snapshot.layer + 1)
            reduced = self._sum("shard_grad", snapshot.layer + 1)
            kept = self.root_full_grad + self.tied_grad + unreduced + reduced
        else:
            kept = everything + self.tied_grad
        if run.first and phase == "reduced":
            new = block.full_grad + (0 if self.in_place else block.main.last_grad)
        elif self.in_place and not run.first:
            new = 0
        elif run.last and phase == "reduced" and not behind:
            new = 0  # added before the first reduce-scatter input is made; later ones follow another
        if not run.last:
            return kept + new, 0
        return kept + new, sent or (behind[0].main.reduce_input if behind else 0)

    def _deferred_root(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """The same for the root group, after all blocks."""
        blocks = self.blocks_shard_grad if run.last else self.blocks_full_grad
        sent = self.blocks[0].main.reduce_input if snapshot.phase == "root" else self.root_reduce_input
        reduce_input = sent if run.last else 0
        if snapshot.phase != "root":
            return blocks + self.root_full_grad, reduce_input
        # The embedding's gradient is computed whole before it is added; a tied one is the sum of two parts.
        added = self.root_full_grad + self.embedding_grad + 2 * self.tied_grad
        return blocks + (self.root_late_grads if run.first else added), reduce_input


def find_fsdp_peak(job: Job, snapshots: Sequence[MemorySnapshot], micro_batches: int) -> MemorySnapshot:
    """The largest snapshot of a step under ZeRO-2 or 3, of equal ones the first.

    Args:
        job: With its layout settled.
        snapshots: Snapshots of the model.
        micro_batches: Micro-batches of a step.
    """
    sizes, largest, peak = FSDPSizes.of(job, list_stages(job)[0]), -1, None
    for run in _list_passes(micro_batches):
        for snapshot in snapshots:
            # The embedding's temporary bytes are a gradient, which `gradients` counts.
            temporary = 0 if snapshot.phase == "root" else snapshot.temporary
            live = snapshot.activations + temporary + sum(sizes.gathered(snapshot, run))
            live += sum(sizes.gradients(snapshot, run))
            if live > largest:
                largest, peak = live, (snapshot, run, temporary)
    assert peak is not None, "a step has snapshots"
    snapshot, run, temporary = peak
    root, blocks, buffers = sizes.gathered(snapshot, run)
    gradients, reduce_inputs = sizes.gradients(snapshot, run)
    return replace(
        snapshot,
        temporary=temporary,
        gradients=gradients,
        gathered=root + blocks + buffers,
        gathered_formula=f"{root} (root group) + {blocks} (blocks) + {buffers} (all-gather buffers)",
        reduce_inputs=reduce_inputs,
    )
