"""The moments of a step at which a rank can be fullest, beside its state: the loss, and blocks on the way back.

Lines of a moment: ``activations`` (kept for backward passes), ``logits`` (of the loss), ``workspace`` (gradients of
activations and what is computed again), ``buffers`` (of collectives) and ``gathered`` (parameters that ZeRO has
gathered, and their gradients on the way to be reduced).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.decoder_memory import LOSS_CHUNK_ELEMENTS, LOSS_CHUNK_TOKENS
from meshwright.plan.estimate.activations import Kept, Tokens, block_kept, kept_bytes
from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.stages import Stage
from meshwright.plan.estimate.state import FLOAT32, LOW_BYTES, Sharding
from meshwright.plan.estimate.weights import Held, Weights
from meshwright.plan.estimate.workload import Workload

INT64_BYTES = 8.0
WORKSPACE_BYTES = 64 * 2.0**20
"""What the matrix libraries take on a GPU (measured on one H200, torch 2.11)."""


@dataclass(frozen=True)
class Job:
    """What all classes of a workload's ranks share."""

    workload: Workload
    grid: Grid
    weights: Weights
    tokens: Tokens
    sharding: Sharding
    low: float
    """Bytes of a 16-bit element, or 4 in float32."""
    dense: tuple[Kept, Kept, Kept]
    expert: tuple[Kept, Kept, Kept]

    @classmethod
    def of(cls, workload: Workload, grid: Grid) -> Job:
        """Counted once for all classes."""
        return cls(
            workload,
            grid,
            Weights.of(workload.model),
            Tokens.of(workload, grid),
            Sharding.of(workload, grid),
            LOW_BYTES[workload.precision],
            block_kept(workload, expert=False),
            block_kept(workload, expert=True),
        )


@dataclass(frozen=True)
class Moment:
    """Lines of one moment, and the part of the gradients that exists by then."""

    activations: Floats
    logits: Floats
    workspace: Floats
    gathered: Floats
    gradients: Floats | float = 1.0
    possible: Flags | bool = True

    @property
    def bytes(self) -> Floats:
        """All of it but gradients."""
        return self.activations + self.logits + self.workspace + self.gathered


@dataclass(frozen=True)
class Stack:
    """Activations of a stage."""

    block: Floats
    """The largest block with nothing recomputed."""
    waiting: Floats
    """What it keeps until its backward pass begins."""
    all: Floats
    """All blocks of all micro-batches in flight."""

    @classmethod
    def of(cls, job: Job, stage: Stage) -> Stack:
        """Of each layout."""
        grid, tokens = job.grid, job.tokens
        dense = kept_bytes(job.dense, grid, tokens)
        block = kept_bytes(job.dense, grid, tokens, recompute=False)
        if not job.workload.model.num_experts:
            return cls(block, dense, stage.in_flight * stage.layers * dense)
        routed = kept_bytes(job.expert, grid, tokens)
        whole = kept_bytes(job.expert, grid, tokens, recompute=False)
        only_dense = stage.expert_layers == 0
        held = stage.in_flight * (stage.dense_layers * dense + stage.expert_layers * routed)
        return cls(np.where(only_dense, block, whole), np.where(only_dense, dense, routed), held)


def list_moments(job: Job, stage: Stage, held: Held) -> list[Moment]:
    """The moments of a class of ranks."""
    stack = Stack.of(job, stage)
    if job.workload.profile.memory.blocks == "eager":
        return _eager_moments(job, stage, held, stack)
    last = stack.all - stack.waiting + stack.block
    backward = Moment(
        stack.all,
        np.zeros(len(job.grid)),
        last - stack.all + _backward_work(job),
        _gathered_backward(job, held),
    )
    if not stage.heads.any():
        return [backward]
    return [backward, _loss(job, stage, held, stack)]


def _backward_work(job: Job) -> Floats:
    """Gradients of activations that live when a feed-forward is on its way back.

    The residual stream's; then the larger of the gathered one with that of the inner vector, and the gradient of
    both halves of a gated inner vector. Routed experts: as many copies as tokens are sent to, permuted twice.
    """
    model, grid, tokens, low = job.workload.model, job.grid, job.tokens, job.low
    halves = 2.0 if model.activation == "swiglu" else 1.0
    gathered = np.where(grid.sequence_parallel & (grid.tp > 1), tokens.count * (model.hidden_size * low), 0.0)
    inner = tokens.split * (model.ffn_size * low)
    work = tokens.stream * (model.hidden_size * low) + np.maximum(gathered + inner, halves * inner)
    if model.num_experts:
        wide = 2 * model.hidden_size + halves * model.expert_width
        work = np.maximum(work, tokens.stream * (model.hidden_size * low) + tokens.routed * (wide * low))
    return work


def _gathered_backward(job: Job, held: Held) -> Floats:
    """Blocks that ZeRO-3 has gathered in 16 bits, and one block's gradients: made, and copied to be reduced."""
    grid, low = job.grid, job.low
    block = held.block + held.expert_block
    ahead = 1.0 + grid.prefetch
    sharded = np.where(grid.zero >= 3, block * (ahead * low + low + FLOAT32), 0.0)
    return sharded + _gathered_stage(job, held)


def _gathered_stage(job: Job, held: Held) -> Floats:
    """Parameters that stay gathered for the whole step."""
    rules, grid = job.workload.profile.memory, job.grid
    stays = np.zeros(len(grid), dtype=np.bool_)
    if rules.shards_with_gradients:
        stays = stays | (grid.zero == 2)
    if rules.pipeline_unsharded:
        stays = stays | ((grid.zero == 3) & (grid.pp > 1))
    return np.where(stays, job.low * (held.dense + held.experts), 0.0)


def _loss(job: Job, stage: Stage, held: Held, stack: Stack) -> Moment:
    """The larger of the loss itself and the head's backward pass, with the stack as it stands.

    The loss holds each logit as often as the profile says. The head's backward pass holds the logits' gradient in
    16 bits, the gathered input, its gradient and, where products add to main gradients, a 16-bit tensor like the
    head.
    """
    rules, grid, tokens, low = job.workload.profile.memory, job.grid, job.tokens, job.low
    width = job.workload.model.hidden_size * low
    logits = tokens.count * (held.table / job.workload.model.hidden_size)
    norms = 2 * tokens.stream * width
    gathered = np.where(grid.sequence_parallel & (grid.tp > 1), tokens.count * width, 0.0)
    held_logits = np.where(grid.tp > 1, rules.split_logit_bytes, rules.logit_bytes)
    scratch = held.table * low if rules.scratch_gradients else 0.0
    loss = held_logits * logits + norms + gathered
    head = low * logits + norms + gathered + tokens.count * width + scratch
    table = np.where(grid.zero >= 3, held.table * low + held.block * low, 0.0)
    return Moment(
        stack.all,
        np.maximum(loss, head),
        np.zeros(len(grid)),
        np.maximum(table, _gathered_stage(job, held)),
        possible=stage.heads,
    )


def _eager_moments(job: Job, stage: Stage, held: Held, stack: Stack) -> list[Moment]:
    """Meshwright's: as ``plan/decoder_memory.py`` lists them, on columns."""
    model, grid, tokens, low = job.workload.model, job.grid, job.tokens, job.low
    sums = (grid.micro_batches(job.workload.global_batch) > 1) | (grid.world_size > 1)
    copies = np.zeros(len(grid)) if low == FLOAT32 else (held.block - job.weights.norms) * low
    mine = np.maximum(held.dense + held.experts, 1.0)
    head = np.where(stage.heads, held.table, 0.0)
    zeros = np.zeros(len(grid))
    # 16-bit copies of a block's weights are kept with its activations, or until the forward pass ends.
    kept_copies = np.where(grid.recompute == 0, copies * stage.layers * (grid.zero < 2), 0.0)
    this_copy = np.where(grid.recompute == 0, 0.0, copies * (grid.zero < 2))
    work = _eager_backward_work(job) + np.where(
        model.tied_embeddings & sums & stage.heads, head * FLOAT32, 0.0
    )
    top = stack.all + kept_copies
    again = stack.block - stack.waiting + this_copy
    backward = Moment(
        top, zeros, again + work, _gathered_backward(job, held), np.where(sums, 1.0, head / mine)
    )
    block = np.where(grid.recompute == 0, stack.block + copies * (grid.zero < 2), stack.block + this_copy)
    first = Moment(
        block,
        zeros,
        work,
        _gathered_backward(job, held),
        np.where(sums, 1.0, 1.0 - (held.block + np.where(stage.embeds, held.table, 0.0)) / mine),
    )
    parts = (3.0 if model.tied_embeddings else 1.0) - np.where(sums, 0.0, 1.0)
    embedding = Moment(zeros, zeros, held.table * FLOAT32 * parts, zeros, possible=stage.embeds)
    moments = [backward, first, embedding]
    if stage.heads.any():
        chunk = _loss_chunk(job.workload)
        logits = np.minimum(tokens.count, chunk) * (held.table / model.hidden_size)
        temporary = (
            2 * tokens.stream * (model.hidden_size * low) + held.table * FLOAT32 + logits * 2 * FLOAT32
        )
        if low != FLOAT32:
            copy = held.table * low
            temporary = temporary + copy + np.maximum(0.0, copy - logits * (2 * FLOAT32 - low))
            blocks = np.where(grid.recompute == 0, 0.0, copies * stage.layers * (grid.zero < 2))
            temporary = temporary + blocks
        norm = tokens.stream * ((model.hidden_size + 1) * FLOAT32)
        gradients = np.where(sums, 1.0, 0.0)
        table = np.where(grid.zero >= 3, held.table * low + held.block * low, _gathered_stage(job, held))
        moments.append(Moment(top + norm, temporary, zeros, table, gradients, stage.heads))
    return moments


def _eager_backward_work(job: Job) -> Floats:
    """Beside the residual's gradient that of the inner vector, with the down matrix's or one more inner one."""
    model, tokens, low = job.workload.model, job.tokens, job.low
    hidden = tokens.stream * (model.hidden_size * FLOAT32)
    inner = tokens.split * (model.ffn_size * low)
    down = model.ffn_size * model.hidden_size * FLOAT32 / job.grid.tp
    work = hidden + inner + (np.maximum(inner, down) if model.activation == "swiglu" else down)
    if model.num_experts:
        work = np.maximum(
            work, hidden + tokens.routed * ((2 * model.hidden_size + 2 * model.expert_width) * low)
        )
    return work


def _loss_chunk(workload: Workload) -> int:
    """Tokens whose logits Meshwright's loss holds at once."""
    least, most = LOSS_CHUNK_TOKENS
    return min(most, max(least, LOSS_CHUNK_ELEMENTS[workload.cluster.device] // workload.model.vocab_size))


def steady_buffers(job: Job, stage: Stage, held: Held) -> Floats:
    """What lives through the whole step beside state and activations: buffers of collectives, scratch, tables."""
    workload, grid, tokens, low = job.workload, job.grid, job.tokens, job.low
    model, rules, weights = workload.model, workload.profile.memory, job.weights
    buffers = np.full(len(grid), WORKSPACE_BYTES if workload.cluster.device == "cuda" else 0.0)
    if rules.scratch_gradients:
        buffers += low * _scratch_elements(job, stage)
    if rules.bucket_bytes:
        buffers += np.where(grid.world_size > 1, np.minimum(rules.bucket_bytes, 2 * low * held.dense), 0.0)
    edge = tokens.stream * (model.hidden_size * low)
    tensors = 2.0 + rules.stale_boundaries * (stage.in_flight + 1)
    buffers += np.where(grid.pp > 1, tensors * edge, 0.0)
    ring = (grid.cp > 1) & (grid.context == 0)
    buffers += np.where(ring, tokens.split * (4.0 * model.kv_size * low), 0.0)
    if rules.blocks == "eager":
        tables = 2 * workload.seq_len * model.head_size * FLOAT32 if model.positions == "rope" else 0.0
        words = (3 if workload.document_mask else 2) + (
            workload.document_mask and model.positions == "learned"
        )
        buffers += tables + words * tokens.count * INT64_BYTES
        if workload.document_mask:
            buffers += grid.micro_batch * (float(workload.seq_len) ** 2 * low)
    del weights
    return buffers


def _scratch_elements(job: Job, stage: Stage) -> Floats:
    """Distinct weight shapes of a stage, once each: attention, dense feed-forward, shared and one routed expert."""
    model, weights, tp = job.workload.model, job.weights, job.grid.tp
    elements = weights.attention / tp + weights.latents
    elements = elements + np.where(stage.dense_layers > 0, weights.ffn / tp, 0.0)
    if model.num_experts:
        shared = 0.0 if model.shared_experts == 1 else weights.shared / tp
        elements = elements + np.where(stage.expert_layers > 0, shared + weights.expert / job.grid.etp, 0.0)
    return elements
