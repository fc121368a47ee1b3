"""A lower bound of the peak memory, for every layout of a grid; the search prunes by it.

The exact ledger walks every point of a step on every pipeline rank. The bound counts a few of these points,
and part of what is live there, from the same sizes (``plan.memory.decoder``). It counts nothing that the
ledger does not count, so a layout whose bound does not fit cannot fit. Tests check that the bound stays below
the ledger.

The bound adds to a rank's sharded state, without a pipeline, the largest of: the loss, the last block's
backward pass, all gradients. With a pipeline it adds the in-flight micro-batches of the first and the last
pipeline rank: their activations or, with a split backward pass, their deferred weight gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES, operand_bytes
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.estimate.compiled import find_compiled_peak
from meshwright.plan.estimate.grid import (
    ACCUMULATES,
    CONTEXTS,
    OFFLOADS,
    RECOMPUTES,
    Flags,
    Floats,
    Grid,
    Ints,
)
from meshwright.plan.estimate.sizes import expert_shards
from meshwright.plan.estimate.stages import V_SHAPED
from meshwright.plan.estimate.weights import WeightCounts
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.block import BlockSizes
from meshwright.plan.memory.decoder import loss_temp_bytes
from meshwright.plan.memory.feed_forward import FeedForwardSizes, size_experts, size_feed_forward
from meshwright.plan.memory.fit import overhead
from meshwright.plan.memory.ledger import GPU_WORKSPACE_BYTES
from meshwright.plan.memory.stage import deferred_weight_grad_bytes
from meshwright.plan.predict import require_decoder
from meshwright.plan.time.engine import StepEstimate
from meshwright.plan.time.stage_layers import HeldLayers, count_end_layers
from meshwright.schedule.pipeline.closed_forms import CODES, peak_in_flight
from meshwright.spec.job import Job
from meshwright.spec.layout import SCHEDULES, Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.model import DecoderModel

ADAMW_BYTES = 8.0
"""Optimizer state per element with AdamW; other optimizers count as none."""
DEFERRED, OFFLOAD_OPTIMIZER, OFFLOAD_ALL = (
    ACCUMULATES.index("deferred"),
    OFFLOADS.index("optimizer"),
    OFFLOADS.index("all"),
)
"""Codes of layout.accumulate and layout.offload."""
SPLIT_BACKWARD = (CODES["zb-h1"], *V_SHAPED)


@dataclass(frozen=True)
class _Block:
    """Bytes of one micro-batch in one block on a rank, one value per layout."""

    saved: Floats
    """Activations saved for the backward pass."""
    backward_peak: Floats
    """Live at the peak of the backward pass."""
    deferred_grads: Floats
    """Kept from the input-gradient to the weight-gradient pass of a split backward pass."""
    copies: Floats
    """bf16 weight copies among the saved activations; a split backward pass keeps none."""


@dataclass(frozen=True)
class EndCosts:
    """Cost of embedding and head, in blocks, one value per layout."""

    embedding: Floats
    head: Floats

    @classmethod
    def of(cls, step: StepEstimate) -> EndCosts:
        """From an estimated step; the costs do not depend on the pipeline schedule."""
        return cls(step.embedding.total / step.block.total, step.head.total / step.block.total)

    def take(self, indices: np.ndarray) -> EndCosts:
        """The costs of some layouts."""
        return EndCosts(self.embedding[indices], self.head[indices])


class PeakBound:
    """Memory bounds of one job's layouts. Layouts with equal blocks share their sizes."""

    def __init__(self, job: Job) -> None:
        self.job, self.model, self.workload = job, require_decoder(job), Workload.of(job)
        self.weights = WeightCounts.of(self.model)
        self._sizes: dict[tuple[int, ...], tuple[float, ...]] = {}

    def needed_bytes(self, grid: Grid, ends: EndCosts) -> Floats:
        """A lower bound of the device memory of the rank that needs most.

        Args:
            grid: The layouts.
            ends: Cost of embedding and head; it decides how many layers a pipeline stage gets.
        """
        reserve, context = overhead(self.job)
        return np.asarray(self.peak_bytes(grid, ends) * (1 + reserve) + context, dtype=np.float64)

    def peak_bytes(self, grid: Grid, ends: EndCosts) -> Floats:
        """A lower bound of peak live tensors, on the rank that needs most."""
        columns = self._look_up(grid)
        one = grid.pp == 1
        peaks = np.zeros(len(grid))
        if one.any():
            peaks[one] = self._without_pipeline(grid.take(one), columns[:, one])
        if not one.all():
            peaks[~one] = self._with_pipeline(grid.take(~one), columns[:, ~one], ends.take(~one))
        workspace = GPU_WORKSPACE_BYTES if self.job.cluster.device == "cuda" else 0
        return peaks + workspace

    def least_bytes(self, grid: Grid) -> Floats:
        """A lower bound from the model state alone; it holds for any schedule."""
        layers = np.where(
            grid.pp == 1, self.model.num_layers, np.maximum(self.model.num_layers // grid.pp - 1, 1)
        )
        experts = np.maximum(0.0, layers - self._dense_layers)
        none = np.zeros(len(grid), dtype=np.bool_)
        parameters, gradients, optimizer = self._state(
            grid, *self._elements(grid, layers.astype(float), experts, none, none)
        )
        reserve, context = overhead(self.job)
        return np.asarray((parameters + gradients + optimizer) * (1 + reserve) + context, dtype=np.float64)

    def cpu_bytes(self, grid: Grid) -> Floats:
        """A lower bound of the CPU memory for offloaded state, on an average rank."""
        layers, experts = self.model.num_layers / grid.pp, self.model.expert_layers / grid.pp
        none = np.zeros(len(grid), dtype=np.bool_)
        kept = dataclasses.replace(grid, offload=np.zeros_like(grid.offload))
        parameters, _, optimizer = self._state(kept, *self._elements(kept, layers, experts, none, none))
        offloaded = np.where(grid.offload >= OFFLOAD_OPTIMIZER, optimizer, 0.0)
        return np.asarray(
            offloaded + np.where(grid.offload == OFFLOAD_ALL, parameters, 0.0), dtype=np.float64
        )

    def _look_up(self, grid: Grid) -> Floats:
        """Sizes of each layout's blocks and loss, one column per layout; distinct ones are computed once."""
        keys = np.stack(
            (
                grid.tp, grid.cp, grid.context, grid.sequence_parallel.astype(np.int64), grid.zero >= 2,
                grid.micro_batch, grid.recompute, grid.ep, grid.etp,
            )
        )  # fmt: skip
        distinct, indices = np.unique(keys, axis=1, return_inverse=True)
        rows = [self._sizes_of(tuple(int(value) for value in key)) for key in distinct.T]
        return np.array(rows, dtype=np.float64).T[:, indices.reshape(-1)]

    def _sizes_of(self, key: tuple[int, ...]) -> tuple[float, ...]:
        if key not in self._sizes:
            self._sizes[key] = self._count_sizes(key)
        return self._sizes[key]

    def _count_sizes(self, key: tuple[int, ...]) -> tuple[float, ...]:
        """Sizes of a dense block, of an expert block and of the loss, as in the ledger."""
        tp, cp, context, sequence, sharded, micro, recompute, ep, etp = key
        layout = Layout(
            "given", tp=tp, cp=cp, ep=ep, etp=etp, micro_batch=micro, sequence_parallel=bool(sequence),
            dp_shard=max(1, ep * etp // (tp * cp)), zero=2 if sharded else 0,
            context=CONTEXTS[context], recompute=RECOMPUTES[recompute],  # type: ignore[arg-type]
        )  # fmt: skip
        job = with_layout(self.job, layout)
        model = local_model(job)
        assert isinstance(model, DecoderModel), "the bound is of decoders"
        dense = self._count_block(job, model, size_feed_forward(job, model, micro))
        sizes, *first = dense
        routed = first
        if self.model.expert_layers:
            sizes, *routed = self._count_block(job, model, size_experts(job, model, micro))
        loss = float(sizes.norm + loss_temp_bytes(job, model, sizes))
        return (*first, *routed, loss)

    @staticmethod
    def _count_block(
        job: Job, model: DecoderModel, feed_forward: FeedForwardSizes
    ) -> tuple[BlockSizes, float, float, float, float]:
        sizes = BlockSizes.of(job, model, job.layout.micro_batch or 1, feed_forward)
        backward_peak = (
            sizes.full + sizes.residual + min(feed_forward.backward_temp, feed_forward.first_backward_temp)
        )
        copies = float(sizes.weight_copies) if job.layout.recompute == "none" else 0.0
        return (
            sizes,
            float(sizes.saved),
            float(backward_peak),
            float(deferred_weight_grad_bytes(model, sizes)),
            copies,
        )

    def _without_pipeline(self, grid: Grid, columns: Floats) -> Floats:
        """State plus the largest of: loss, last block's backward pass, all gradients."""
        dense, routed, loss = _Block(*columns[:4]), _Block(*columns[4:8]), columns[8]
        experts = float(self.model.expert_layers)
        last = routed if experts else dense
        stack = (self.model.num_layers - experts) * dense.saved + experts * routed.saved
        held = self._elements(grid, float(self.model.num_layers), experts, True, True)
        parameters, gradients, optimizer = self._state(grid, *held)
        several = grid.micro_batches(self.job.train.global_batch) > 1
        kept = np.where(several & (grid.offload != OFFLOAD_ALL), gradients, 0.0)
        gathered = self._gathered(grid, float(self.model.num_layers), experts)
        head = self.weights.table / grid.tp * FLOAT32_BYTES * (1.0 - 1.0 * several)
        candidates = (
            stack + loss + kept + gathered,
            stack - last.saved + last.backward_peak + kept + gathered + np.minimum(head, gradients),
            stack - last.saved + kept + self._reducing(grid, True),
            gradients,
        )
        peaks = np.maximum.reduce(np.broadcast_arrays(*candidates))
        peaks = self._compiled(grid, peaks, kept > 0)
        copies = np.where(grid.zero < 2, self.workload.copy_bytes / grid.tp, 0.0)
        return np.asarray(parameters + optimizer + peaks + copies, dtype=np.float64)

    def _compiled(self, grid: Grid, eager: Floats, sums: Flags) -> Floats:
        """The ledger's exact peak for compiled or Triton blocks whose layers are not split."""
        unsharded = grid.has_unsharded_layers
        if self.workload.compiled_job is None or not unsharded.any():
            return eager
        peak = find_compiled_peak(self.workload.compiled_job, grid, unsharded, sums)
        made = np.asarray(peak.activations.bytes) + np.asarray(peak.workspace.bytes)
        return np.where(unsharded, made, eager)

    def _with_pipeline(self, grid: Grid, columns: Floats, ends: EndCosts) -> Floats:
        """The larger of the first and the last pipeline rank, with their in-flight micro-batches.

        Args:
            grid: The layouts, all with a pipeline.
            columns: Result of :meth:`_look_up`.
            ends: Cost of embedding and head.
        """
        held = count_end_layers(grid, self.model.num_layers, ends.embedding, ends.head)
        ranks = (np.zeros_like(grid.pp), grid.pp - 1)
        return np.maximum(*(self._of_rank(grid, columns, r, h) for r, h in zip(ranks, held, strict=True)))

    def _of_rank(self, grid: Grid, columns: Floats, rank: Ints, held: HeldLayers) -> Floats:
        """State of a pipeline rank plus its in-flight micro-batches."""
        layers, fewest = held.layers, held.fewest
        dense, routed = _Block(*columns[:4]), _Block(*columns[4:8])
        micro_batches = grid.micro_batches(self.job.train.global_batch)
        split = np.isin(grid.schedule, SPLIT_BACKWARD)
        saved = self._least(dense.saved - split * dense.copies, routed.saved - split * routed.copies)
        deferred_grads = self._least(dense.deferred_grads, routed.deferred_grads)
        in_flight = peak_in_flight(grid.schedule, rank, grid.pp, grid.virtual_stages, micro_batches)
        forward = in_flight * fewest * saved
        deferred = count_pending(grid, rank, micro_batches) * fewest * deferred_grads
        embeds, heads = self._ends(grid, rank)
        experts = np.where(layers > 0, np.maximum(0.0, layers - self._dense_layers), 0.0)
        elements = self._elements(grid, layers, experts, embeds, heads)
        parameters, gradients, optimizer = self._state(grid, *elements)
        summed = (grid.data_degree * grid.cp > 1) & (grid.zero < 2)  # in buckets from the start
        steady = (micro_batches >= 2 * in_flight + 1) & ~split
        kept = np.where(summed | steady, gradients, 0.0)
        gathered = np.where(grid.zero == 2, self._gathered(grid, layers, experts, embeds, heads), 0.0)
        rest = np.maximum(in_flight * fewest - 1, 0) * saved + self._reducing(grid, heads)
        whole = np.where(split & (grid.zero >= 2), fewest * self._block(grid) * FLOAT32_BYTES, 0.0)
        # Weight gradients may be deferred until all gathered parameters are freed.
        flight = np.maximum.reduce((forward + gathered, deferred, np.where(split, 0.0, rest))) + kept
        flight = np.maximum(flight, whole)
        return np.asarray(parameters + optimizer + np.maximum(flight, gradients), dtype=np.float64)

    def _block(self, grid: Grid) -> Floats:
        """Parameters of a block on a rank, without routed experts; of the smaller kind of block."""
        weights = self.weights
        always = weights.attention / grid.tp + weights.latents + weights.norms
        kinds = [weights.ffn / grid.tp] * (self._dense_layers > 0)
        kinds += [weights.shared / grid.tp + weights.router] * (self.model.expert_layers > 0)
        return np.asarray(always + np.minimum.reduce(kinds), dtype=np.float64)

    def _reducing(self, grid: Grid, heads: Flags | bool) -> Floats:
        """ZeRO-2 and 3: a gathered block and its gradients, and those of the head."""
        low = operand_bytes(self.job.train.precision)
        head = np.where(heads, self.weights.table / grid.tp * (FLOAT32_BYTES + low), 0.0)
        return np.where(grid.zero >= 2, 2 * self._block(grid) * low + head, 0.0)

    @property
    def _dense_layers(self) -> float:
        return float(self.model.num_layers - self.model.expert_layers)

    def _least(self, dense: Floats, routed: Floats) -> Floats:
        """The smaller value over the kinds of blocks that the model has."""
        if not self.model.expert_layers:
            return dense
        return routed if not self._dense_layers else np.minimum(dense, routed)

    @staticmethod
    def _ends(grid: Grid, rank: Ints) -> tuple[Flags, Flags]:
        """Whether the embedding, and whether the head, are on a pipeline rank."""
        v_shaped = np.isin(grid.schedule, V_SHAPED)
        return rank == 0, np.where(v_shaped, rank == 0, rank == grid.pp - 1)

    def _elements(
        self,
        grid: Grid,
        layers: Floats | float,
        experts: Floats | float,
        embeds: Flags | bool,
        heads: Flags | bool,
    ) -> tuple[Floats, Floats]:
        """Parameters of a rank before sharding: dense ones, and routed experts."""
        weights, tied = self.weights, self.model.tied_embeddings
        always = weights.attention / grid.tp + weights.latents + weights.norms
        block = layers * always + (layers - experts) * weights.ffn / grid.tp
        block = block + experts * (weights.shared / grid.tp + weights.router)
        both = np.asarray(embeds) & np.asarray(heads) & tied
        tables = np.asarray(embeds) * 1.0 + np.asarray(heads) * 1.0 - both * 1.0
        dense = block + tables * weights.table / grid.tp + np.asarray(embeds) * weights.positions
        routed = experts * weights.expert * (self.model.num_experts or 0) / (grid.ep * grid.etp)
        return np.broadcast_to(dense, (len(grid),)), np.broadcast_to(np.asarray(routed), (len(grid),))

    def _state(self, grid: Grid, dense: Floats, experts: Floats) -> tuple[Floats, Floats, Floats]:
        """Bytes of parameters, gradients and optimizer state on the device, after ZeRO and offload."""
        shards, expert_ranks = (grid.dp_shard * grid.cp).astype(float), expert_shards(grid).astype(float)

        def shard(where: Flags) -> Floats:
            return dense / np.where(where, shards, 1.0) + experts / np.where(where, expert_ranks, 1.0)

        whole = shard(grid.zero >= 2) * FLOAT32_BYTES
        deferred = (grid.accumulate == DEFERRED) & (grid.micro_batches(self.job.train.global_batch) > 1)
        gradients = shard((grid.zero >= 2) & ~deferred) * FLOAT32_BYTES
        each = ADAMW_BYTES if self.job.train.optimizer == "adamw" else 0.0
        optimizer = np.where(grid.offload >= OFFLOAD_OPTIMIZER, 0.0, shard(grid.zero >= 1) * each)
        offloaded = grid.offload == OFFLOAD_ALL
        if self.job.train.grad_dtype != "fp32":  # some may be kept in 16 bits
            gradients = gradients / 2
        return np.where(offloaded, 0.0, whole), np.where(offloaded, 0.0, gradients), optimizer

    def _gathered(
        self,
        grid: Grid,
        layers: Floats | float,
        experts: Floats | float,
        embeds: Flags | bool = True,
        heads: Flags | bool = True,
    ) -> Floats:
        """Gathered parameters: embedding, head and final norm with ZeRO-3; with ZeRO-2 the blocks too."""
        low = operand_bytes(self.job.train.precision)
        dense, routed = self._elements(grid, layers, experts, embeds, heads)
        around, _ = self._elements(grid, 0.0, 0.0, embeds, heads)
        gathered = np.where(grid.zero == 2, dense + routed, np.where(grid.zero == 3, around, 0.0))
        return np.asarray(gathered * low, dtype=np.float64)


def count_pending(grid: Grid, rank: Ints, micro_batches: Ints) -> Floats:
    """Micro-batches with deferred weight gradients at the same time, per stage of the last pipeline rank.

    Closed forms; tests check that they do not exceed the simulated schedules. ZB-H1 defers ``pp``
    micro-batches there, ZBV twice as many (two stages), DualPipe-V ``pp``. 0 on other ranks and without a
    split backward.
    """
    zb_h1, zbv, dual = (grid.schedule == SCHEDULES.index(name) for name in ("zb-h1", "zbv", "dualpipe-v"))
    few = np.minimum(micro_batches, grid.pp)
    count = np.where(zb_h1, few, np.where(zbv, 2 * few - 1, np.where(dual, few, 0)))
    return np.where(rank == grid.pp - 1, np.maximum(count, 0), 0).astype(float)
