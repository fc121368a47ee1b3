"""The memory ledger: what one rank holds, line by line, each with its formula.

State is exact to the byte. The peak in a step walks the points at which an eager forward and backward can
be largest: the loss, the head, and each block on the way back. It counts live tensors, not the process and
not the allocator's slack.

With T tokens in a micro-batch, D hidden, Q and K the widths of all query and key heads, F feed-forward, H
heads and e bytes an element (2 under bf16, else 4), a block keeps on CPU::

    T x (2 x ((2 D + 1) x 4 + D e)  +  (2 Q + 2 K) e + 4 H  +  4 F e)
         two norms                     attention               feed-forward

and under bf16 also a copy of its matrices. On GPUs a norm is one kernel and keeps D instead of 2 D; in
float32 attention keeps 2 Q for its 2 K there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.units import MIB
from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.comms import WIRE_BYTES
from meshwright.plan.optimizer import predict_optimizer
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, list_parameters
from meshwright.spec.job import Job

INT64_BYTES = 8
GPU_WORKSPACE_BYTES = 64 * MIB
"""What the matrix libraries take on a Hopper GPU (measured on one H200, torch 2.11)."""


@dataclass(frozen=True)
class Line:
    """One line of the ledger."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class Ledger:
    """Memory of one rank."""

    lines: tuple[Line, ...]
    state_bytes: dict[str, int]
    """Parameters, gradients, optimizer; after backward, before the optimizer's step."""
    peak_bytes: int
    """Largest sum of live tensors from forward to backward."""
    peak_at: str
    """Where in the step that is."""
    first_peak_bytes: int
    """The same in the first step of an attempt."""
    kept_bytes: int
    """Activations that one micro-batch keeps from forward to backward."""


@dataclass(frozen=True)
class _Point:
    """A moment of the step and what lives there beside parameters and optimizer state."""

    name: str
    activations: int
    temporary: int
    gradients: int
    formula: str
    """The activations as a sum that can be checked."""


def predict_ledger(job: Job, micro_batch: int, micro_batches: int) -> Ledger:
    """What a rank of a replicated layout holds."""
    parameters = list_parameters(job.model)
    count = sum(p.count for p in parameters)
    optimizer = predict_optimizer(parameters, job.train)
    state = {
        "parameters": count * FLOAT32_BYTES,
        "gradients": count * FLOAT32_BYTES,
        "optimizer": optimizer.state_bytes,
    }
    buffers = 2 * job.data.seq_len * job.model.head_size * FLOAT32_BYTES
    shape = _Shape.of(job, micro_batch)
    # DDP keeps its buckets; accumulation keeps the sums: either way all gradients live through the step.
    kept = job.layout.dp_replicate > 1 or micro_batches > 1
    points = _points(job, parameters, shape, kept)
    top = max(points, key=lambda p: p.activations + p.temporary + p.gradients)
    lines = [
        Line("parameters", state["parameters"], f"{count} x 4 (float32)"),
        Line("optimizer", optimizer.state_bytes, optimizer.formula),
        Line("gradients at the peak", top.gradients, f"of {count} x 4 (float32)"),
        Line("activations", top.activations, top.formula),
        Line("temporary", top.temporary, f"largest at: {top.name}"),
        Line("rotary tables", buffers, f"2 x {job.data.seq_len} x {job.model.head_size} x 4"),
        Line("batch", shape.batch_bytes, f"2 x {shape.tokens} tokens x 8"),
    ]
    if job.cluster.device == "cuda":
        lines.append(Line("library workspace", GPU_WORKSPACE_BYTES, "cuBLAS and cuBLASLt, 32 MiB each"))
    peak = sum(line.bytes for line in lines)
    # Until DDP has reduced once, accumulated gradients are not yet views of its buckets: a second copy.
    second_copy = state["gradients"] if job.layout.dp_replicate > 1 and micro_batches > 1 else 0
    kept_bytes = shape.block * job.model.num_layers + shape.tail + shape.log_softmax
    return Ledger(tuple(lines), state, peak, top.name, peak + second_copy, kept_bytes)


@dataclass(frozen=True)
class _Shape:
    """Sizes of one micro-batch."""

    tokens: int
    element_bytes: int
    """Bytes of a matrix product's operands: 2 under bf16."""
    block: int
    """Bytes that one block keeps for its backward pass, bf16 copies of its weights included."""
    tail: int
    """Bytes that the final norm and the head keep, without the loss."""
    log_softmax: int
    batch_bytes: int

    @classmethod
    def of(cls, job: Job, micro_batch: int) -> _Shape:
        model = job.model
        tokens = micro_batch * job.data.seq_len
        low = 2 if job.train.precision == "bf16" else FLOAT32_BYTES
        width, queries, keys, ffn = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
        # A norm keeps its input in float32 and its output as the products read it; on CPU, where it is not
        # one kernel, also the normalised input.
        copies = 1 if job.cluster.device == "cuda" else 2
        norm = tokens * ((copies * width + 1) * FLOAT32_BYTES + width * low)
        # In float32 on GPUs, keys and values are repeated for every query head before attention.
        kept_keys = queries if job.cluster.device == "cuda" and low == FLOAT32_BYTES else keys
        attention = tokens * ((2 * queries + 2 * kept_keys) * low + model.num_heads * FLOAT32_BYTES)
        feed_forward = tokens * 4 * ffn * low
        cast = low if low != FLOAT32_BYTES else 0
        weights = 2 * width * (queries + keys) + 3 * width * ffn
        return cls(
            tokens=tokens,
            element_bytes=low,
            block=2 * norm + attention + feed_forward + weights * cast,
            tail=norm + model.vocab_size * width * cast,
            log_softmax=tokens * model.vocab_size * FLOAT32_BYTES,
            batch_bytes=2 * tokens * INT64_BYTES,
        )


def _points(job: Job, parameters: Sequence[Parameter], shape: _Shape, kept: bool) -> list[_Point]:
    """The moments at which a step can be largest, in the order of the backward pass."""
    model = job.model
    all_gradients = sum(p.count for p in parameters) * FLOAT32_BYTES
    stack = shape.block * model.num_layers + shape.tail
    head_weight = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    hidden = shape.tokens * model.hidden_size * FLOAT32_BYTES
    early = all_gradients if kept else 0
    layers, loss = model.num_layers, shape.log_softmax
    blocks = f"{layers} blocks x {shape.block} + {shape.tail} (final norm)"
    points = [
        _Point("loss, backward", stack + loss, 2 * loss, early, f"{blocks} + {loss} (log-softmax)"),
        _Point("head, backward", stack, loss + head_weight + hidden, early, blocks),
    ]
    # The feed-forward's backward is the widest of a block: the gradient of its product with that of either
    # the down matrix or the product's other factor, beside the residual's gradient.
    inner = shape.tokens * model.ffn_size * shape.element_bytes
    down_weight = model.ffn_size * model.hidden_size * FLOAT32_BYTES
    temporary = hidden + inner + max(inner, down_weight) + _wire_bytes(job, parameters)
    block_gradients = sum(p.count for p in parameters if p.name.startswith("blocks.0.")) * FLOAT32_BYTES
    done = model.hidden_size * FLOAT32_BYTES + head_weight
    tied = model.tied_embeddings
    if tied and kept:  # the head's part of the shared gradient waits for the embedding's, beside the sums
        temporary += head_weight
    for layer in reversed(range(model.num_layers)):
        gradients = all_gradients if kept else done
        name, formula = f"block {layer}, backward", f"{layer + 1} blocks x {shape.block}"
        points.append(_Point(name, shape.block * (layer + 1), temporary, gradients, formula))
        done += block_gradients
    # A tied gradient is made of two parts and their sum; the sum is the gradient unless others are kept.
    parts = 3 if tied else 1
    last = head_weight * (parts if kept else parts - 1)
    points.append(_Point("embedding, backward", 0, last, all_gradients, "none"))
    return points


def _wire_bytes(job: Job, parameters: Sequence[Parameter]) -> int:
    """The copy that a compressed all-reduce sends."""
    if job.compression.kind == "none" or job.layout.dp_replicate == 1:
        return 0
    sizes = {p.name: p.count for p in parameters}
    buckets = bucket_parameters(parameters, job.layout.bucket_mb)
    return max(sum(sizes[name] for name in bucket) for bucket in buckets) * WIRE_BYTES[job.compression.kind]
