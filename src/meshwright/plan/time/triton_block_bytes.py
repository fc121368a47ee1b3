"""Memory traffic of Triton blocks besides GEMMs and attention; each kernel reads and writes each value once.

For a token, with the letters of ``plan.memory.triton_block``, a block moves::

    add and norm, twice   r D + D e read, r D + D e written
    RoPE                  (Q + K) e read and written
    SwiGLU                2 F e read, F e written
    SwiGLU backward       3 F e read, 2 F e written, and F e where down's input is recomputed
    norm backward, twice  D e + 2 r D read, r D (D e if r is not e) written, D e to recompute the output
    RoPE backward         (Q + 2 K) e read and written

In fp8 the first and the third write one byte, and the output of attention is cast by a separate kernel. The
other casts are part of the GEMM time. Full activation checkpointing adds the previous block's output in a
separate pass, so that norms read only the residual, and runs the forward kernels twice.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    count_gradient_bytes,
    list_parameters,
    operand_bytes,
    residual_bytes,
    runs_in_fp8,
    with_gradients,
)
from meshwright.plan.estimate.grid import Floats
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOSS_PASSES = 3
"""Passes over the logits: read for maximum and sum, read again from memory, written as gradient."""
TABLE_PASSES = 3
"""Passes over float32 embedding rows: read in the forward pass; gradient read and written in the backward."""
Size = TypeVar("Size", float, Floats)


class KernelBytes(NamedTuple, Generic[Size]):
    """Bytes per token that a block's kernels move in 16 bits."""

    forward: Size
    backward: Size
    recomputed: Size
    """Written again by backward kernels, where the inputs of GEMMs are not saved."""


def kernel_bytes(
    low: float, residual: float, width: Size, queries: Size, keys: Size, inner: Size
) -> KernelBytes[Size]:
    """Bytes per token of a block's kernels.

    Args:
        low: Bytes of an activation.
        residual: Bytes of the residual stream.
        width: Elements per token of the residual stream.
        queries: Elements per token of all query heads.
        keys: Elements per token of all key heads; values have as many.
        inner: Elements per token of the feed-forward's inner layer.
    """
    rounded = low if residual != low else 0
    return KernelBytes(
        forward=4 * (residual + low) * width + 2 * low * (queries + keys) + 3 * low * inner,
        backward=2 * (low + 3 * residual + rounded) * width
        + 2 * low * (queries + 2 * keys)
        + 5 * low * inner,
        recomputed=low * (2 * width + inner),
    )


def block_bytes(job: Job, model: DecoderModel) -> int:
    """Bytes per token that a block moves, forward and backward."""
    low, residual = operand_bytes(job.train.precision), residual_bytes(job.train)
    width, inner, recompute = model.hidden_size, model.ffn_size, job.layout.recompute
    queries, keys = model.query_size, model.kv_size
    kernels = kernel_bytes(low, residual, width, queries, keys, inner)
    into_heads = runs_in_fp8(job, queries + 2 * keys, width)
    into_inner = runs_in_fp8(job, inner, width)
    forward = kernels.forward
    forward -= (low - 1) * (into_heads * width + into_inner * (width + inner))
    forward += (low + 1) * queries if runs_in_fp8(job, width, queries) else 0
    kept = recompute == "none"
    recompute_bytes = 0 if kept and not into_heads else low * width
    recompute_bytes += 0 if kept and not into_inner else low * (width + inner)
    backward = kernels.backward + recompute_bytes
    if recompute == "full":
        forward -= (residual + low) * width
        return int(2 * forward + (2 * residual + low) * width + backward)
    return int(forward + backward)


def step_bytes(job: Job, model: DecoderModel, micro_batches: int) -> float:
    """Bytes that a step moves besides GEMMs, attention and the update: blocks, embedding, head, gradients."""
    low, residual = operand_bytes(job.train.precision), residual_bytes(job.train)
    rows, width = (job.layout.micro_batch or 1) * job.data.seq_len, model.hidden_size
    embedding = TABLE_PASSES * FLOAT32_BYTES + 2 * residual
    norm = 2 * (residual + low) + low + 2 * residual + (low if residual != low else 0)
    ends = rows * ((embedding + norm) * width + LOSS_PASSES * low * model.vocab_size)
    ends += model.vocab_size * width * FLOAT32_BYTES  # zeroing the embedding gradient
    total = micro_batches * (rows * model.num_layers * block_bytes(job, model) + ends)
    gradients = count_gradient_bytes(with_gradients(job, list_parameters(model)))
    return total + (micro_batches - 1) * 3 * gradients + gradients  # read once for their norm
