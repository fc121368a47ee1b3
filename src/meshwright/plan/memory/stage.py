"""Walks the actions of one pipeline stage: forward, backward, weight gradients of a split backward.

Between its forward and its backward of a micro-batch a stage saves the activations of its blocks (``block``);
the last stage also those of the final norm and of the loss, whose head gradient is computed in forward.

Where backward is split, every linear layer of a block keeps its input and its output gradient from the
input-gradient half (B) to the weight-gradient half (W). An input that several layers read is kept once.

Assumed: a stage's output is not saved for its own backward; every stage makes the document mask of every
micro-batch; every forward pass makes 16-bit weight copies, which are saved unless backward is split. With
data parallelism gradients are views of buckets and live from the start.

Under ZeRO-2 and 3 ``fsdp`` adds to each snapshot, and ``split_backward`` where backward is split. A stage
reads no weights while another stage of the rank runs, and while it computes weight gradients. Then its root
group is gathered under ZeRO-3 if its last pass was a forward pass; under ZeRO-2 all its groups are gathered
until its last backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.layout.parameters import FLOAT32_BYTES, INT64_BYTES, list_block, operand_bytes
from meshwright.layout.stages import StageSpec
from meshwright.plan.memory.block import NORM_TENSORS, BlockPoint, BlockSizes, size_blocks
from meshwright.plan.memory.decoder import (
    embedding_bytes,
    head_bytes,
    list_fsdp_points,
    logits_bytes,
    loss_temp_bytes,
    mask_bytes,
    prefetch_window,
    sum_block_grads,
)
from meshwright.plan.memory.fsdp import FSDPSizes, MicroBatchPass
from meshwright.plan.memory.snapshots import MemorySnapshot, PersistentGrads, find_persistent_grads
from meshwright.plan.memory.split_backward import SplitBackwardGrads
from meshwright.plan.memory.walker import StepWalker
from meshwright.schedule.pipeline.actions import Kind
from meshwright.schedule.pipeline.in_flight import StageState, WeightGrads
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def deferred_weight_grad_bytes(model: DecoderModel, sizes: BlockSizes) -> int:
    """Inputs and output gradients of a block's linear layers that W needs."""
    elements = 2 * model.hidden_size + 2 * (model.query_size + model.kv_size)
    return sizes.tokens * elements * sizes.elem_bytes + sizes.feed_forward.deferred


def _without_copies(sizes: BlockSizes, model: DecoderModel, saves_copies: bool) -> BlockSizes:
    """A linear layer that defers its weight gradient saves the weight itself, and no 16-bit copy."""
    if not sizes.weight_copies:
        return sizes
    half = model.hidden_size * (model.query_size + 2 * model.kv_size) * sizes.elem_bytes
    saved = sizes.saved - (sizes.weight_copies if saves_copies else 0)
    return replace(
        sizes,
        weight_copies=0,
        full=sizes.full - sizes.weight_copies,
        saved=saved,
        saved_formula=f"{saved} per block" if saves_copies else sizes.saved_formula,
        attention_saved=sizes.attention_saved - half,
        attention_forward=max(0, sizes.attention_forward - half),
    )


class StageMemory:
    """One stage: its saved activations, and the peak of each action."""

    def __init__(
        self, job: Job, part: StageSpec, micro_batch: int, split: bool, rows: Sequence[int] | None
    ) -> None:
        """Size one stage.

        Args:
            job: With its layout settled.
            part: The stage.
            micro_batch: Samples of one forward pass.
            split: Whether backward is split.
            rows: Rows that experts read in each of its MoE layers; None for an even share.
        """
        assert isinstance(part.model, DecoderModel), "the legality table splits decoders only"
        self.job, self.part, self.model, self.split = job, part, part.model, split
        self.recompute, self.layers = job.layout.recompute != "none", len(part.layers)
        self.blocks = size_blocks(job, self.model, part.layers, micro_batch, rows)
        copies = sum(block.weight_copies for block in self.blocks.blocks)
        self.forward_copies = copies if split or self.recompute else 0
        """16-bit weight copies that live until a forward pass ends, and are not saved."""
        if split:
            self.blocks = self.blocks.replace(
                lambda block: _without_copies(block, self.model, saves_copies=not self.recompute)
            )
        self.sizes = self.blocks.last
        self.fsdp = FSDPSizes.of(job, part) if job.layout.zero >= 2 else None
        self.split_grads = SplitBackwardGrads(self.fsdp) if self.fsdp and split else None
        self.persistent_grads = find_persistent_grads(job)
        size = sum(p.count for p in part.parameter_kinds) * FLOAT32_BYTES
        self.all_grads = self.fsdp.grads_between if self.fsdp else size
        self.start_grads = self.persistent_grads.count_bytes(part.parameter_kinds)
        """Gradients that live from the start of the step, in buckets."""
        self.half_grads = self.all_grads
        """Gradients after the first half of a split backward."""
        self.table = head_bytes(self.model)
        """The head, or the embedding, or the gradient of either."""
        self.width = self.sizes.tokens * self.model.hidden_size * self.sizes.elem_bytes
        """Output of a linear layer of the hidden size: T x D x e."""
        self.input_bytes = self._count_inputs(micro_batch)
        """Saved of a micro-batch outside of blocks and loss."""
        self._peaks: dict[tuple[Kind, StageState], MemorySnapshot] = {}
        if split and self.fsdp is None:
            ends = 0 if self.persistent_grads.dense else (part.first + part.last) * self.table
            new = self.start_grads + ends + sum(self._new_grads.values())
            self.half_grads = min(self.all_grads, new)
        self.loss_saved = self.sizes.norm + self.width + self.table if part.last else 0
        self.saved = self.blocks.saved() + self.loss_saved + self.input_bytes
        """Saved between forward and backward."""
        self._deferred = {id(block): self._deferred_bytes(block) for block in self.blocks.blocks}
        self.deferred = sum(self._deferred[id(block)] for block in self.blocks.blocks)
        """Kept between B and W; 0 where backward is not split."""

    def _count_inputs(self, micro_batch: int) -> int:
        """The batch on a GPU, the document mask, and what the embedding saves."""
        documents = self.job.data.mask == "document"
        on_gpu = self.job.cluster.device == "cuda"
        indices = self.part.first * self.sizes.tokens
        indices += micro_batch * self.job.data.seq_len if documents else 0
        embedding = embedding_bytes(self.job, self.sizes) if self.part.first else 0
        return on_gpu * indices * INT64_BYTES + mask_bytes(self.job, self.sizes, micro_batch) + embedding

    def _deferred_bytes(self, block: BlockSizes) -> int:
        return deferred_weight_grad_bytes(self.model, block) if self.split else 0

    @property
    def touched(self) -> int:
        """Activations of a micro-batch without activation checkpointing."""
        blocks = sum(block.full for block in self.blocks.blocks)
        return blocks + (self.sizes.norm + logits_bytes(self.model, self.sizes) if self.part.last else 0)

    @functools.cached_property
    def _new_grads(self) -> Mapping[int, int]:
        """Gradients that the first backward computes, by layer; a split one those of experts."""
        persistent = self.persistent_grads
        new = PersistentGrads(not persistent.dense and not self.split, not persistent.experts)
        return sum_block_grads(self.job, self.model, self.part.layers, new)

    def _start(self, state: StageState) -> StepWalker:
        """A walk of an action that begins in this state."""
        return StepWalker(
            self.input_bytes, gradients=(self.start_grads, self.half_grads, self.all_grads)[state.grads]
        )

    def _walk_forward(self, state: StageState) -> list[MemorySnapshot]:
        """A forward pass up to its last block, and the loss."""
        sizes, before, walker = self.sizes, self.layers - 1, self._start(state)
        walker.alloc(activations=self.blocks.saved(before), temporary=self.forward_copies)
        formula, at = f"{self.blocks.formula(before)}, + the running block", (before, "")
        walker.snapshot("forward, attention", formula, activations=sizes.attention_forward, at=at)
        name, saved, temporary = "forward, output", sizes.full, self.width + sizes.residual
        if self.recompute:
            name, saved = "forward, feed-forward", sizes.saved
            temporary += sizes.feed_forward.forward_temp
        walker.snapshot(name, formula, activations=saved, temporary=temporary, at=at)
        if self.part.last:
            walker.alloc(activations=sizes.saved + sizes.norm)
            formula = f"{self.blocks.formula()}, + {sizes.norm} (final norm)"
            temporary = loss_temp_bytes(self.job, self.model, sizes)
            walker.snapshot("loss, forward", formula, temporary=temporary)
        return walker.snapshots

    def _walk_backward(self, state: StageState) -> list[MemorySnapshot]:
        """A backward pass, or its first half."""
        walker, blocks, first = self._start(state), self.blocks, not state.grads
        walker.alloc(activations=blocks.saved())
        if self.part.last:
            self._walk_head(walker, first)
        if self.fsdp is not None:
            top, temporary = (self.layers - 1, "unshard"), self.sizes.residual
            walker.snapshot("backward, all-gather", blocks.formula(), temporary=temporary, at=top)
        listed = blocks.find_extremes(prefetch_window(self.job) if self.fsdp else 0)
        for index in reversed(range(self.layers)):
            block = blocks.blocks[index]
            walker.free(activations=block.saved)
            if index in listed:
                formula = blocks.formula(index)
                for point in self._list_points(index, block, first):
                    walker.snapshot(
                        point.name,
                        f"{formula}, + {point.saved} (this block)",
                        activations=point.saved,
                        temporary=point.temporary,
                        at=(index - point.below, point.phase),
                    )
            new = self._new_grads[self.part.layers[index]] if first else 0
            walker.alloc(activations=self._deferred[id(block)], gradients=new)
        if self.part.first:
            new = self.table if self.split else self.all_grads - walker.gradients
            temporary = 0 if self.fsdp or first else self.table  # FSDP counts it among the gradients
            walker.alloc(gradients=new if first else 0)
            walker.snapshot("embedding, backward", "none", temporary=temporary, at=(None, "root"))
        if self.fsdp is not None and (self.part.first or self.part.last):
            walker.snapshot("root group, reduce-scatter", "none", at=(None, "reduced"))
        return walker.snapshots

    def _walk_head(self, walker: StepWalker, first: bool) -> None:
        """Backward of the loss and of the final norm."""
        formula = self.blocks.formula()
        walker.snapshot("loss, backward", formula, activations=self.loss_saved)
        if self.model.norm == "rms" and self.job.cluster.device == "cpu":
            # Under FSDP the head's gradient is not sharded yet.
            temporary = NORM_TENSORS * self.sizes.residual + (self.table if self.fsdp else 0)
            new = self.table if first else 0
            walker.snapshot("final norm, backward", formula, temporary=temporary, gradients=new)
        walker.alloc(gradients=self.table if first and not self.persistent_grads.dense else 0)

    def _list_points(self, index: int, block: BlockSizes, first: bool) -> list[BlockPoint]:
        """Points of a block's backward."""
        temporary = block.backward_temp(first=first and not self.persistent_grads.experts)
        if self.split:  # no weight gradients
            temporary = block.residual + block.feed_forward.input_grad_temp
        points = block.list_points(self.job, temporary)
        if self.fsdp is None or self.split:
            return points
        return points + list_fsdp_points(self.job, index, self.sizes.residual)

    def _walk_weight_grads(self, state: StageState) -> list[MemorySnapshot]:
        """The second half of a split backward."""
        largest = max(p.count for p in list_block(self.model, self.part.layers[0]))
        name, formula = "weight gradients", "inputs and output gradients of linear layers"
        if self.split_grads is not None:
            # The GEMM writes its own precision, which is then cast.
            elem = operand_bytes(self.job.train.precision)
            temporary = largest * (FLOAT32_BYTES + (elem if elem < FLOAT32_BYTES else 0))
            grads, reduce_input = self.split_grads.weight_grads(state)
            idle, before = self.idle(state), self.split_grads.between_actions(state)
            return [
                MemorySnapshot(name, self.deferred, temporary, before, formula, gathered=idle),
                MemorySnapshot(f"{name}, reduce-scatter", 0, 0, grads, "none", gathered=idle + reduce_input),
            ]
        walker = self._start(state)
        before = min(max(self.half_grads, walker.gradients), self.all_grads)
        walker.alloc(activations=self.deferred, gradients=before - walker.gradients)
        walker.snapshot(name, formula, temporary=largest * FLOAT32_BYTES)
        walker.free(activations=self.deferred - self.deferred // self.layers)
        walker.alloc(gradients=self.all_grads - before)
        walker.snapshot(name, formula)
        return walker.snapshots

    def idle(self, state: StageState, shares_root: bool = False) -> int:
        """ZeRO-2 and 3: gathered parameters while the stage reads no weights."""
        return self.fsdp.idle(state, shares_root) if self.fsdp is not None else 0

    def _settle(self, state: StageState) -> StageState:
        """The state as far as it matters: all gradients exist from the start where all are in buckets."""
        if self.fsdp is not None:
            return state
        return StageState(WeightGrads.ALL if self.start_grads == self.all_grads else state.grads)

    def idle_grads(self, state: StageState) -> int:
        """Gradients while another stage of the rank runs."""
        if self.split_grads is not None:
            return self.split_grads.between_actions(state)
        return (self.start_grads, self.half_grads, self.all_grads)[self._settle(state).grads]

    def peak(self, kind: Kind, state: StageState) -> MemorySnapshot:
        """The largest snapshot of an action, of equal ones the first."""
        key = kind, self._settle(state)
        if key not in self._peaks:
            self._peaks[key] = self._find_peak(*key)
        return self._peaks[key]

    def _find_peak(self, kind: Kind, state: StageState) -> MemorySnapshot:
        walk = {
            Kind.FORWARD: self._walk_forward,
            Kind.BACKWARD: self._walk_backward,
            Kind.WEIGHT: self._walk_weight_grads,
        }[kind]
        snapshots = walk(state)
        if self.fsdp is None or kind is Kind.WEIGHT:
            return max(snapshots, key=lambda snapshot: snapshot.bytes)
        added = [self._count_fsdp(snapshot, state) for snapshot in snapshots]
        live = [s.activations + s.temporary + sum(more) for s, more in zip(snapshots, added, strict=True)]
        at = live.index(max(live))
        return replace(snapshots[at], gradients=added[at][0], gathered=added[at][1])

    def _count_fsdp(self, snapshot: MemorySnapshot, state: StageState) -> tuple[int, int]:
        """ZeRO-2 and 3: gradients, and gathered parameters with reduce-scatter inputs, at a snapshot."""
        assert self.fsdp is not None, "only under ZeRO-2 and 3"
        run = MicroBatchPass(not state.grads, last=False)
        if self.split_grads is not None:
            gradients, reduce_input = self.split_grads.input_grads(snapshot, state)
        else:
            gradients, reduce_input = self.fsdp.gradients(snapshot, run)
        return gradients, sum(self.fsdp.gathered(snapshot, run)) + reduce_input
