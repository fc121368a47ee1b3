"""Snapshots of a step on columns: the loss, the head's backward, the blocks' backward.

Lines of a snapshot: ``activations`` (saved for backward), ``logits`` (of the loss and the head),
``workspace`` (gradients of activations, recomputed activations) and ``gathered`` (parameters that ZeRO has
all-gathered, and their unreduced gradients). Meshwright's own snapshots are in ``eager``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.plan.estimate.activations import SavedBytes, Tokens, block_saved_bytes, sum_saved_bytes
from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.stages import Stage
from meshwright.plan.estimate.state import ACTIVATION_BYTES, FLOAT32, Sharding
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.weights import LocalWeightCounts, WeightCounts
from meshwright.plan.estimate.workload import Workload


@dataclass(frozen=True)
class EstimateInputs:
    """Inputs that all classes of ranks share, counted once."""

    workload: Workload
    grid: Grid
    weights: WeightCounts
    tokens: Tokens
    sharding: Sharding
    activation_element_bytes: float
    """Bytes of an activation element: 2, or 4 in float32."""
    dense: BlockActivations
    expert: BlockActivations

    @classmethod
    def of(cls, workload: Workload, grid: Grid) -> EstimateInputs:
        """Columns of each layout."""
        tokens = Tokens.of(workload, grid)
        return cls(
            workload,
            grid,
            WeightCounts.of(workload.model),
            tokens,
            Sharding.of(workload, grid),
            ACTIVATION_BYTES[workload.precision],
            BlockActivations.of(block_saved_bytes(workload, expert=False), grid, tokens),
            BlockActivations.of(block_saved_bytes(workload, expert=True), grid, tokens),
        )


@dataclass(frozen=True)
class BlockActivations:
    """Activations of a block of one micro-batch."""

    saved: Sum
    """Saved until its backward begins."""
    full: Sum
    """Saved without activation checkpointing."""

    @classmethod
    def of(
        cls, kinds: tuple[SavedBytes, SavedBytes, SavedBytes], grid: Grid, tokens: Tokens
    ) -> BlockActivations:
        """Columns of each layout."""
        return cls(
            sum_saved_bytes(kinds, grid, tokens), sum_saved_bytes(kinds, grid, tokens, recompute=False)
        )


@dataclass(frozen=True)
class GridMemorySnapshot:
    """Lines of one snapshot, and the fraction of the gradients that exists by then."""

    name: str
    activations: Sum
    logits: Sum
    workspace: Sum
    gathered: Sum
    gradients: Floats | float = 1.0
    possible: Flags | bool = True


SNAPSHOT_LINES = ("activations", "logits", "workspace", "gathered")
NOTHING = Sum()
BLOCKS_NOT_OFFLOADED = 2.0
"""Blocks whose activations stay on the device under offloading: the current one, and one in transfer."""


@dataclass(frozen=True)
class StageActivations:
    """Activations of a pipeline stage."""

    all: Sum
    """All blocks of all in-flight micro-batches."""
    recomputed: Sum
    """Bytes that recomputing a block adds to its saved activations."""
    block: Sum
    """The largest block without activation checkpointing."""
    saved: Sum
    """Saved by it until its backward begins."""

    @classmethod
    def of(cls, inputs: EstimateInputs, stage: Stage) -> StageActivations:
        """Columns of each layout."""
        found = cls._on_device(inputs, stage)
        if not inputs.workload.profile.memory.offloads_activations:
            return found
        kept = np.minimum(BLOCKS_NOT_OFFLOADED, stage.in_flight * stage.layers)
        return replace(found, all=found.saved.times(kept))

    @classmethod
    def _on_device(cls, inputs: EstimateInputs, stage: Stage) -> StageActivations:
        dense, full = inputs.dense.saved, inputs.dense.full
        recompute = (inputs.grid.recompute > 0).astype(np.float64)
        if not inputs.workload.model.num_experts:
            return cls(
                all=dense.times(stage.in_flight, stage.layers),
                recomputed=full.times(recompute) + dense.times(-1.0, recompute),
                block=full,
                saved=dense,
            )
        routed = inputs.expert.saved
        expert = (stage.expert_layers > 0).astype(np.float64)
        no_expert = 1.0 - expert
        block = full.times(no_expert) + inputs.expert.full.times(expert)
        saved = dense.times(no_expert) + routed.times(expert)
        local = dense.times(stage.dense_layers) + routed.times(stage.expert_layers)
        more = (block + saved.times(-1.0)).times(recompute)
        return cls(all=local.times(stage.in_flight), recomputed=more, block=block, saved=saved)


def list_snapshots(
    inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts
) -> list[GridMemorySnapshot]:
    """The snapshots of a class of ranks, all frameworks but Meshwright."""
    activations = StageActivations.of(inputs, stage)
    gathered = sum_gathered(inputs, local)
    snapshots = [
        GridMemorySnapshot(name, activations.all, NOTHING, activations.recomputed + work, gathered)
        for name, work in _list_feed_forward_points(inputs)
    ]
    return snapshots + _head_snapshots(inputs, stage, local, activations) if stage.heads.any() else snapshots


def _list_feed_forward_points(inputs: EstimateInputs) -> list[tuple[str, Sum]]:
    """Gradients of activations in the backward of a feed-forward.

    That of the residual stream; and that of the inner activation with the all-gathered one, or both halves of
    a gated inner activation. Routed experts: one per routed token, permuted twice.
    """
    model, grid, tokens, element_bytes = (
        inputs.workload.model,
        inputs.grid,
        inputs.tokens,
        inputs.activation_element_bytes,
    )
    halves = 2.0 if model.activation == "swiglu" else 1.0
    hidden_size, ffn_size = float(model.hidden_size), float(model.ffn_size)
    sequence_parallel = grid.sequence_parallel & (grid.tp > 1)
    residual = Term("gradient of the residual", (tokens.residual, hidden_size, element_bytes))
    gathered = Term("all-gathered gradient", (sequence_parallel, tokens.count, hidden_size, element_bytes))
    inner = Term("gradient of the inner activation", (tokens.split, ffn_size, element_bytes))
    both = Term("gradients inside the feed-forward", (halves, tokens.split, ffn_size, element_bytes))
    works = [
        ("down, backward", Sum((residual, gathered, inner))),
        ("activation, backward", Sum((residual, both))),
    ]
    if model.num_experts:
        routed = Term("gradients of routed tokens", (2.0, tokens.routed, hidden_size, element_bytes))
        inside = Term(
            "gradients inside experts", (halves, tokens.routed_inner, model.expert_width, element_bytes)
        )
        works.append(("experts, backward", Sum((residual, routed, inside))))
    return works


def sum_gathered(inputs: EstimateInputs, local: LocalWeightCounts) -> Sum:
    """Blocks that ZeRO-3 has all-gathered in 16 bits; gradients of one block and their copy for reduction.

    DeepSpeed gathers weight by weight: the largest one, and its gradient.
    """
    grid, element_bytes, model = inputs.grid, inputs.activation_element_bytes, inputs.workload.model
    if inputs.workload.profile.memory.gathers == "matrix":
        largest = float(max(model.ffn_size, model.value_size, model.query_size) * model.hidden_size)
        matrix = Term("a weight and its gradient", (streamed(grid), 2.0, largest, element_bytes), grid.tp)
        return Sum((matrix,)) + sum_unsharded(inputs, local)
    block, whole = local.block + local.expert_block, sum_unsharded(inputs, local)
    partly = streamed(grid) & (np.asarray(whole.bytes) == 0.0) if whole.parts else streamed(grid)
    prefetched = np.minimum(grid.prefetch, model.num_layers)
    ahead = Term("all-gathered blocks", (partly, 1.0 + prefetched, block, element_bytes))
    gradients = Term("gradients of a block", (streamed(grid), block, element_bytes + FLOAT32))
    return Sum((ahead, gradients)) + whole


def streamed(grid: Grid) -> Flags:
    """Where parameters are gathered and freed block by block: ZeRO-3, and offloaded parameters."""
    return np.asarray((grid.zero >= 3) | (grid.offload == 2))


def sum_unsharded(inputs: EstimateInputs, local: LocalWeightCounts) -> Sum:
    """Parameters that stay all-gathered for the whole step."""
    rules, grid = inputs.workload.profile.memory, inputs.grid
    stays = np.zeros(len(grid), dtype=np.bool_)
    if rules.zero2_shards_parameters:
        stays = stays | (grid.zero == 2)
    if rules.pipeline_unsharded:
        stays = stays | ((grid.zero == 3) & (grid.pp > 1))
    stays = stays & (grid.offload != 2)
    if not stays.any():
        return NOTHING
    return Sum(
        (Term("all-gathered stage", (stays, inputs.activation_element_bytes, local.dense + local.experts)),)
    )


def _head_snapshots(
    inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts, activations: StageActivations
) -> list[GridMemorySnapshot]:
    """The loss and the head's backward, with all activations saved.

    The loss holds as many bytes per logit as the profile says. The head's backward holds the logits' 16-bit
    gradient, the all-gathered input, its gradient and, where GEMMs accumulate into main gradients, a 16-bit
    tensor of the head's shape.
    """
    rules, grid, tokens, element_bytes = (
        inputs.workload.profile.memory,
        inputs.grid,
        inputs.tokens,
        inputs.activation_element_bytes,
    )
    width = float(inputs.workload.model.hidden_size)
    rows = local.table / width
    whole_rows = inputs.workload.model.vocab_size if rules.gathers_logits else rows
    sequence_parallel = grid.sequence_parallel & (grid.tp > 1)
    whole = rules.logit_bytes
    if inputs.workload.compiled and rules.compiled_logit_bytes is not None:
        whole = rules.compiled_logit_bytes
    each = np.where(grid.tp > 1, rules.split_logit_bytes, whole)
    norm = Term("final norm", (2.0, tokens.residual, width, element_bytes))
    gathered = Term("all-gathered input", (sequence_parallel, tokens.count, width, element_bytes))
    loss = Term("logits", (tokens.count, whole_rows, each))
    head = [
        Term("gradient of logits", (tokens.count, rows, np.minimum(element_bytes, each))),
        Term("gradient of the input", (tokens.count, width, element_bytes)),
    ]
    if rules.scratch_gradients:
        head.append(Term("scratch of the head's shape", (local.table, element_bytes)))
    here = sum_head_gathered(inputs, local)
    return [
        GridMemorySnapshot(
            "loss", activations.all, Sum((loss, norm, gathered)), NOTHING, here, possible=stage.heads
        ),
        GridMemorySnapshot(
            "head, backward",
            activations.all,
            Sum((*head, norm, gathered)),
            NOTHING,
            here,
            possible=stage.heads,
        ),
    ]


def sum_head_gathered(inputs: EstimateInputs, local: LocalWeightCounts) -> Sum:
    """Parameters that are all-gathered at the loss: the head and one block, or the stage."""
    whole = sum_unsharded(inputs, local)
    partly = streamed(inputs.grid)
    if whole.parts:
        partly = partly & (np.asarray(whole.bytes) == 0.0)  # the stage is gathered
    return (
        Sum(
            (
                Term(
                    "all-gathered head and block",
                    (partly, local.table + local.block, inputs.activation_element_bytes),
                ),
            )
        )
        + whole
    )
