"""Meshwright's own moments: as ``plan/memory/decoder.py`` lists them for one process, on columns.

Blocks keep a float32 residual stream and, in 16 bits, copies of their weights; the loss goes by chunks of
tokens and makes the head's gradient in the forward pass. Where one process has one micro-batch, gradients
come into being on the way back; else their sums live through the whole step.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshwright.layout.loss_chunks import eager_chunk
from meshwright.plan.estimate.activations import SavedBytes, attention_saved_bytes, sum_saved_bytes
from meshwright.plan.estimate.compiled import find_compiled_peak, has_whole_layers
from meshwright.plan.estimate.grid import Flags, Floats
from meshwright.plan.estimate.snapshots import (
    NOTHING,
    Facts,
    GridSnapshot,
    StageActivations,
    sum_gathered,
    sum_head_gathered,
)
from meshwright.plan.estimate.stages import Stage
from meshwright.plan.estimate.state import FLOAT32
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.weights import LocalWeights

WIDE_ATTENTION = 2.5
"""How many times wider than all query heads a feed-forward is from which attention is never the fullest."""


def list_eager_snapshots(facts: Facts, stage: Stage, held: LocalWeights) -> list[GridSnapshot]:
    """The last block's backward pass, the first's, the embedding's, and the loss."""
    grid, model = facts.grid, facts.workload.model
    stack, sums = StageActivations.of(facts, stage), _keeps_sums(facts)
    copies = _copies(facts, held)
    kept, again = grid.recompute == 0, grid.recompute > 0
    mine = np.maximum(held.dense + held.experts, 1.0)
    head = np.where(stage.heads, held.table, 0.0)
    waits = sums & stage.heads & model.tied_embeddings
    gathered = sum_gathered(facts, held)
    top = stack.all + Sum((Term("16-bit weights", (kept, stage.in_flight, stage.layers, copies)),))
    block = stack.block + Sum((Term("16-bit weights", (copies,)),))
    anew = stack.again + Sum((Term("16-bit weights", (again, copies)),))
    part = Sum((Term("the head's part of a shared gradient", (waits, head, FLOAT32)),))
    parts = (3.0 if model.tied_embeddings else 1.0) - np.where(sums, 0.0, 1.0)
    late = 1.0 - (held.block + held.expert_block + _late_elements(facts, stage, held)) / mine
    snapshots = []
    for name, work in _backward_works(facts):
        last = GridSnapshot(
            f"last block, {name}",
            top,
            NOTHING,
            anew + work + part,
            gathered,
            np.where(sums, 1.0, head / mine),
        )
        first = GridSnapshot(
            f"first block, {name}", block, NOTHING, work + part, gathered, np.where(sums, 1.0, late)
        )
        snapshots += [last, first]
    if facts.workload.model.query_size * WIDE_ATTENTION > facts.workload.model.ffn_size:
        made = np.where(sums, 1.0, head / mine)
        for name, work in _attention_works(facts, stack):
            last = GridSnapshot(f"last block, {name}", top, NOTHING, work + part, gathered, made)
            done = np.where(sums, 1.0, late)
            first = GridSnapshot(f"first block, {name}", stack.waiting, NOTHING, work + part, gathered, done)
            snapshots += [last, first]
    table = Sum((Term("parts of the embedding's gradient", (held.table, FLOAT32, parts)),))
    snapshots.append(
        GridSnapshot("embedding, backward", NOTHING, NOTHING, table, NOTHING, possible=stage.embeds)
    )
    if stage.heads.any():
        snapshots.append(_loss(facts, stage, held, top, copies, sums))
    job, whole = facts.workload.compiled_job, has_whole_layers(grid)
    if job is None or not whole.any():
        return snapshots
    others = [dataclasses.replace(snapshot, possible=snapshot.possible & ~whole) for snapshot in snapshots]
    return [*others, find_compiled_peak(job, grid, whole, sums)]


def _keeps_sums(facts: Facts) -> Flags:
    """Where gradients live through the step: replicas' buckets, shards, accumulation."""
    return np.asarray(
        (facts.grid.micro_batches(facts.workload.global_batch) > 1) | (facts.grid.world_size > 1)
    )


def _copies(facts: Facts, held: LocalWeights) -> Floats:
    """16-bit copies of a block's weights; FSDP2 gathers in 16 bits and needs none."""
    if facts.low == FLOAT32:
        return np.zeros(len(facts.grid))
    elements = held.block - facts.weights.norms + held.expert_block
    return np.where(facts.grid.zero < 2, elements * facts.low, 0.0)


def _late_elements(facts: Facts, stage: Stage, held: LocalWeights) -> Floats:
    """Gradients that only the embedding's backward pass makes; a tied head has made its part before."""
    table = 0.0 if facts.workload.model.tied_embeddings else held.table
    return np.where(stage.embeds, table + facts.weights.positions, 0.0)


def _backward_works(facts: Facts) -> list[tuple[str, Sum]]:
    """Beside the residual's gradient the inner vector's, with the down matrix's or one more inner one."""
    model, tokens, low = facts.workload.model, facts.tokens, facts.low
    width, wide = float(model.hidden_size), float(model.ffn_size)
    hidden = Term("gradient of the residual", (tokens.residual, width, FLOAT32))
    inner = Term("gradient of the inner vector", (tokens.split, wide, low))
    down = Term("gradient of the down matrix", (wide, width, FLOAT32), facts.grid.tp)
    works = [("down product", Sum((hidden, inner, down)))]
    if model.activation == "swiglu":
        works.append(("gate", Sum((hidden, inner.times(2.0)))))
    if model.num_experts:
        each = 2.0 * model.hidden_size + 2.0 * model.expert_width
        works.append(
            ("experts", Sum((hidden, Term("gradients of routed copies", (tokens.routed, each, low)))))
        )
    return works


def _attention_works(facts: Facts, stack: StageActivations) -> list[tuple[str, Sum]]:
    """A block whose first half is on its way back, or is computed again and turned by its positions.

    Turning holds what is turned and its swapped half, and three products with the tables in float32.
    """
    model, tokens, low, grid = facts.workload.model, facts.tokens, facts.low, facts.grid
    width, queries, keys = float(model.hidden_size), float(model.query_size), float(model.kv_size)
    kept = attention_saved_bytes(facts.workload)
    half = sum_saved_bytes((kept, kept, kept), grid, tokens, recompute=False)
    bare = sum_saved_bytes(
        (SavedBytes(shared=kept.shared, gathered=kept.gathered),) * 3, grid, tokens, recompute=False
    )
    hidden = Term("gradient of the residual", (tokens.residual, width, FLOAT32))
    copies = Term("16-bit weights", (0.0 if low == FLOAT32 else low, width, queries + 2 * keys), grid.tp)
    gradients = kept.split - FLOAT32 * model.num_heads
    inside = Sum.of(hidden, copies, Term("gradients inside attention", (tokens.split, gradients)))
    works = [("attention, backward", stack.waiting.times(-1.0) + half + inside)]
    if model.positions == "rope":
        once = 2 * low + 3 * FLOAT32
        each = max(queries * once + 2 * keys * low, 2 * queries * low + keys * (once + low))
        turned = Sum.of(hidden, copies, Term("turned", (tokens.split, each)))
        stream = (grid.recompute == 1, tokens.residual, -width * FLOAT32)
        read = (grid.recompute == 1, tokens.split, -(queries + 2 * keys) * low)
        spare = Sum.of(Term("input", stream), Term("products read", read)) + stack.waiting.times(
            grid.recompute == 1
        )
        again = (stack.waiting.times(-1.0) + bare + turned + spare).times(grid.recompute > 0)
        works.append(("recompute", again))
    return works


def _loss(
    facts: Facts, stage: Stage, held: LocalWeights, top: Sum, copies: Floats, sums: Flags
) -> GridSnapshot:
    """The loss, in the forward pass: the whole stack waits, and the head's gradient grows."""
    grid, tokens, low, model = facts.grid, facts.tokens, facts.low, facts.workload.model
    width = float(model.hidden_size)
    logits = np.minimum(tokens.count, eager_chunk(facts.workload.cluster.device, model)) * (
        held.table / width
    )
    terms = [
        Term("input and its gradient", (2.0, tokens.residual, width, low)),
        Term("the head's gradient", (held.table, FLOAT32)),
        Term("a chunk's logits, twice", (logits, 2.0, FLOAT32)),
    ]
    if low != FLOAT32:
        copy = held.table * low
        more = np.maximum(0.0, copy - logits * (2 * FLOAT32 - low))
        terms += [
            Term("16-bit head", (copy,)),
            Term("its gradient in 16 bits beyond the chunk", (more,)),
            Term("16-bit weights of the blocks", (grid.recompute > 0, copies, stage.layers)),
        ]
    norm = Sum((Term("final norm", (tokens.residual, width + 1.0, FLOAT32)),))
    gradients = np.where(sums, 1.0, 0.0)
    return GridSnapshot(
        "loss", top + norm, Sum(tuple(terms)), NOTHING, sum_head_gathered(facts, held), gradients, stage.heads
    )
