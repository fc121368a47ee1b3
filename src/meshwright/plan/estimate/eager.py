"""Meshwright's snapshots on columns, as ``plan.memory.decoder`` walks them for one layout.

Blocks save a float32 residual stream and, under bf16 and fp16, 16-bit weight copies. The loss runs in chunks
of tokens and computes the head's gradient in forward. With one process and one micro-batch, backward
allocates the gradients one by one; otherwise they are persistent.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.layout.loss_chunks import eager_chunk
from meshwright.plan.estimate.activations import SavedBytes, attention_saved_bytes, sum_saved_bytes
from meshwright.plan.estimate.compiled import find_compiled_peak
from meshwright.plan.estimate.grid import Flags, Floats
from meshwright.plan.estimate.memory_snapshots import (
    NOTHING,
    EstimateInputs,
    GridMemorySnapshot,
    StageActivations,
    sum_gathered,
    sum_head_gathered,
)
from meshwright.plan.estimate.stages import Stage
from meshwright.plan.estimate.state import FLOAT32
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.weights import LocalWeightCounts
from meshwright.plan.memory.block import rope_peak_bytes

WIDE_ATTENTION = 2.5
"""From this ratio of feed-forward size to query width on, attention is never the peak."""


def list_eager_snapshots(
    inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts
) -> list[GridMemorySnapshot]:
    """Backward of the last block, of the first one and of the embedding, and the loss."""
    grid, model = inputs.grid, inputs.workload.model
    activations, persistent = StageActivations.of(inputs, stage), _has_persistent_grads(inputs)
    copies, recompute = _weight_copies(inputs, local), grid.recompute > 0
    elements = np.maximum(local.dense + local.experts, 1.0)
    head = np.where(stage.heads, local.table, 0.0)
    gathered = sum_gathered(inputs, local)
    makes_copies = (inputs.activation_element_bytes < FLOAT32) & (grid.zero < 2)
    all_copied = (local.matrices + local.experts, inputs.activation_element_bytes)
    copied = Term("16-bit weight copies", (~recompute & makes_copies, stage.in_flight, *all_copied))
    saved = activations.all + Sum((copied,))
    block = activations.block + Sum((Term("16-bit weight copies", (copies,)),))
    recomputed = activations.recomputed + Sum((Term("16-bit weight copies", (recompute, copies)),))
    has_tied_part = persistent & stage.heads & model.tied_embeddings
    tied = Sum((Term("head's part of a tied gradient", (has_tied_part, head, FLOAT32)),))
    parts = (3.0 if model.tied_embeddings else 1.0) - np.where(persistent, 0.0, 1.0)
    late = local.block + local.expert_block + _late_elements(inputs, stage, local)
    last_grads = np.where(persistent, 1.0, head / elements)
    first_grads = np.where(persistent, 1.0, 1.0 - late / elements)
    points = [(name, work, block, recomputed) for name, work in _list_feed_forward_points(inputs)]
    if model.query_size * WIDE_ATTENTION > model.ffn_size:
        works = _list_attention_points(inputs, activations)
        points += [(name, work, activations.saved, NOTHING) for name, work in works]
    snapshots = []
    for name, work, live, recomputed in points:
        workspace = recomputed + work + tied
        snapshots += [
            GridMemorySnapshot(f"last block, {name}", saved, NOTHING, workspace, gathered, last_grads),
            GridMemorySnapshot(f"first block, {name}", live, NOTHING, work + tied, gathered, first_grads),
        ]
    table = Sum((Term("parts of the embedding's gradient", (local.table, FLOAT32, parts)),))
    snapshots.append(
        GridMemorySnapshot("embedding, backward", NOTHING, NOTHING, table, NOTHING, possible=stage.embeds)
    )
    if stage.heads.any():
        snapshots.append(_loss(inputs, stage, local, saved, persistent))
    job, unsharded = inputs.workload.compiled_job, grid.has_unsharded_layers
    if job is None or not unsharded.any():
        return snapshots
    others = [
        dataclasses.replace(snapshot, possible=snapshot.possible & ~unsharded) for snapshot in snapshots
    ]
    return [*others, find_compiled_peak(job, grid, unsharded, persistent)]


def _has_persistent_grads(inputs: EstimateInputs) -> Flags:
    """Where gradients live through the step: in DDP buckets, sharded, or accumulated."""
    return np.asarray(
        (inputs.grid.micro_batches(inputs.workload.global_batch) > 1) | (inputs.grid.world_size > 1)
    )


def _weight_copies(inputs: EstimateInputs, local: LocalWeightCounts) -> Floats:
    """16-bit copies of a block's weights; FSDP2 all-gathers in 16 bits and needs none."""
    if inputs.activation_element_bytes == FLOAT32:
        return np.zeros(len(inputs.grid))
    elements = local.block - inputs.weights.norms + local.expert_block
    return np.where(inputs.grid.zero < 2, elements * inputs.activation_element_bytes, 0.0)


def _late_elements(inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts) -> Floats:
    """Elements whose gradient the embedding's backward computes; a tied head has computed its part before."""
    table = 0.0 if inputs.workload.model.tied_embeddings else local.table
    return np.where(stage.embeds, table + inputs.weights.positions, 0.0)


def _list_feed_forward_points(inputs: EstimateInputs) -> list[tuple[str, Sum]]:
    """Points in the backward pass of a feed-forward, with the temporary tensors of each.

    ``down``: the gradients of the residual stream and of the inner activation, and the weight gradient of the
    down projection. ``gate`` (SwiGLU): the gradients of the residual stream and of both inner activations.
    ``experts``: the gradients of the residual stream, of routed tokens and inside experts.
    """
    model, tokens, element_bytes = inputs.workload.model, inputs.tokens, inputs.activation_element_bytes
    hidden_size, ffn_size = float(model.hidden_size), float(model.ffn_size)
    hidden = Term("gradient of the residual", (tokens.residual, hidden_size, FLOAT32))
    inner = Term("gradient of the inner activation", (tokens.split, ffn_size, element_bytes))
    down = Term("weight gradient of down", (ffn_size, hidden_size, FLOAT32), inputs.grid.tp)
    works = [("down", Sum((hidden, inner, down)))]
    if model.activation == "swiglu":
        works.append(("gate", Sum((hidden, inner.times(2.0)))))
    if model.num_experts:
        routed = Term("gradients of routed tokens", (2.0, tokens.routed, hidden_size, element_bytes))
        inside = Term(
            "gradients inside experts", (2.0, tokens.routed_inner, model.expert_width, element_bytes)
        )
        works.append(("experts", Sum((hidden, routed, inside))))
    return works


def _list_attention_points(inputs: EstimateInputs, activations: StageActivations) -> list[tuple[str, Sum]]:
    """A block whose attention is in backward, or is recomputed up to RoPE."""
    model, tokens, element_bytes, grid = (
        inputs.workload.model,
        inputs.tokens,
        inputs.activation_element_bytes,
        inputs.grid,
    )
    width, queries, keys = float(model.hidden_size), float(model.query_size), float(model.kv_size)
    kept = attention_saved_bytes(inputs.workload)
    half = sum_saved_bytes((kept, kept, kept), grid, tokens, recompute=False)
    bare = sum_saved_bytes(
        (SavedBytes(shared=kept.shared, gathered=kept.gathered),) * 3, grid, tokens, recompute=False
    )
    hidden = Term("gradient of the residual", (tokens.residual, width, FLOAT32))
    copies = Term(
        "16-bit weight copies",
        (0.0 if element_bytes == FLOAT32 else element_bytes, width, queries + 2 * keys),
        grid.tp,
    )
    gradients = kept.split - FLOAT32 * model.num_heads
    inside = Sum.of(hidden, copies, Term("gradients inside attention", (tokens.split, gradients)))
    works = [("attention, backward", activations.saved.times(-1.0) + half + inside)]
    if model.positions == "rope":
        rotated = Sum.of(
            hidden, copies, Term("rotated", (tokens.split, rope_peak_bytes(model, element_bytes)))
        )
        stream = (grid.recompute == 1, tokens.residual, -width * FLOAT32)
        read = (grid.recompute == 1, tokens.split, -(queries + 2 * keys) * element_bytes)
        spare = Sum.of(Term("input", stream), Term("GEMM outputs read", read)) + activations.saved.times(
            grid.recompute == 1
        )
        recomputed = (activations.saved.times(-1.0) + bare + rotated + spare).times(grid.recompute > 0)
        works.append(("recompute", recomputed))
    return works


def _loss(
    inputs: EstimateInputs, stage: Stage, local: LocalWeightCounts, saved: Sum, persistent: Flags
) -> GridMemorySnapshot:
    """The loss, in forward: all activations are saved, and the head's gradient is computed.

    Autocast keeps its weight copies until the forward pass ends. Experts' copies are recomputed.
    """
    grid, tokens, element_bytes, model = (
        inputs.grid,
        inputs.tokens,
        inputs.activation_element_bytes,
        inputs.workload.model,
    )
    width = float(model.hidden_size)
    logits = np.minimum(tokens.count, eager_chunk(inputs.workload.cluster.device, model)) * (
        local.table / width
    )
    terms = [
        Term("input and its gradient", (2.0, tokens.residual, width, element_bytes)),
        Term("gradient of the head", (local.table, FLOAT32)),
        Term("chunk of logits, twice", (logits, 2.0, FLOAT32)),
    ]
    if element_bytes != FLOAT32:
        copy, keeps_copies = local.table * element_bytes, (grid.recompute > 0) & (grid.zero < 2)
        more = np.maximum(0.0, copy - logits * (2 * FLOAT32 - element_bytes))
        terms += [
            Term("16-bit head", (copy,)),
            Term("its 16-bit gradient beyond the chunk", (more,)),
            Term("16-bit weight copies of the blocks", (keeps_copies, local.matrices, element_bytes)),
        ]
    norm = Sum((Term("final norm", (tokens.residual, width + 1.0, FLOAT32)),))
    gradients = np.where(persistent, 1.0, 0.0)
    return GridMemorySnapshot(
        "loss",
        saved + norm,
        Sum(tuple(terms)),
        NOTHING,
        sum_head_gathered(inputs, local),
        gradients,
        stage.heads,
    )
