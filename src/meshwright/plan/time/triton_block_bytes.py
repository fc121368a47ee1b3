"""Bytes that our own kernels move beside products and attention: every pass reads and writes each value once.

For a token, with the letters of ``own_memory``, a block of ``run.models.fused`` moves::

    add and norm, twice  r D + D e read, r D + D e written
    rotation             (Q + K) e read and written
    gate                 2 F e read, F e written
    its way back         3 F e read, 2 F e written, and F e where down's input is made again
    norm's, twice        D e + 2 r D read, r D (and D e if r is not e) written, and D e for its output again
    rotation's           (Q + 2 K) e read and written

In 8 bits the first and the third write one byte, and what comes out of attention is cast in a pass of its
own. The other casts are of a product's operands, and in its time. Full recomputation adds what the last block
gave in a pass, so that norms read the stream alone, and runs the forward passes twice.
"""

from __future__ import annotations

from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    count_gradient_bytes,
    list_parameters,
    operand_bytes,
    residual_bytes,
    runs_in_fp8,
    with_gradients,
)
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOSS_PASSES = 3
"""Of logits: read for largest and sum, read again where caches do not reach, written as gradient."""
TABLE_PASSES = 3
"""Of float32 rows of the embedding: read forward; of its gradient read and written on the way back."""


def block_bytes(job: Job, model: DecoderModel) -> int:
    """What a block moves for each token, forward and backward."""
    low, stream = operand_bytes(job.train.precision), residual_bytes(job.train)
    width, inner, recompute = model.hidden_size, model.ffn_size, job.layout.recompute
    queries, keys = model.query_size, model.kv_size
    into_heads = runs_in_fp8(job, queries + 2 * keys, width)
    into_inner = runs_in_fp8(job, inner, width)
    normal = (1 if into_heads else low) + (1 if into_inner else low)
    added = 2 * (2 * stream + low) * width
    added -= (stream + low) * width if recompute == "full" else 0
    forward = added + normal * width + 2 * low * (queries + keys) + 2 * low * inner
    forward += (1 if into_inner else low) * inner
    forward += (low + 1) * queries if runs_in_fp8(job, width, queries) else 0
    kept = recompute == "none"
    again = 0 if kept and not into_heads else low * width
    again += 0 if kept and not into_inner else low * (width + inner)
    rounded = low if stream != low else 0
    backward = 5 * low * inner + 2 * (low + 3 * stream + rounded) * width + again
    backward += 2 * low * (queries + 2 * keys)
    if recompute == "full":
        return 2 * forward + (2 * stream + low) * width + backward
    return forward + backward


def step_bytes(job: Job, model: DecoderModel, micro_batches: int) -> float:
    """What a step moves beside products, attention and the update: blocks, what is around them, gradients."""
    low, stream = operand_bytes(job.train.precision), residual_bytes(job.train)
    rows, width = (job.layout.micro_batch or 1) * job.data.seq_len, model.hidden_size
    embedding = TABLE_PASSES * FLOAT32_BYTES + 2 * stream
    norm = 2 * (stream + low) + low + 2 * stream + (low if stream != low else 0)
    ends = rows * ((embedding + norm) * width + LOSS_PASSES * low * model.vocab_size)
    ends += model.vocab_size * width * FLOAT32_BYTES  # the embedding's gradient is cleared
    total = micro_batches * (rows * model.num_layers * block_bytes(job, model) + ends)
    gradients = count_gradient_bytes(with_gradients(job, list_parameters(model)))
    return total + (micro_batches - 1) * 3 * gradients + (gradients if job.train.clip else 0)
