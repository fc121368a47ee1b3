"""Bytes of one micro-batch's tensors in an eager decoder block.

With T tokens per micro-batch, D the hidden size, Q and K the widths of all query and key heads, F the
feed-forward size, H heads and e bytes per element (2 under bf16 and fp16, else 4), a Llama-shaped block saves
for backward on CPU::

    T x (2 x ((2 D + 1) x 4 + D e)  +  (2 Q + 2 K) e + 4 H  +  4 F e)
         two norms                     attention               feed-forward

and under bf16 and fp16 also a 16-bit copy of its weights. On GPUs RMSNorm is one kernel and saves D instead
of 2 D, as LayerNorm does everywhere; in float32 attention saves 2 Q instead of 2 K there. The second half of
a block, dense or MoE, is in ``feed_forward``.

Activation checkpointing: ``full`` saves T x D x 4 per block, ``selective`` also the GEMM outputs: T x ((2 Q +
2 K + D) e + 4 H + 2 F e). In both cases one whole block is live while its backward runs.

Under tensor parallelism the model is the narrower one of a rank (``layout.tensor_parallel``). Under sequence
parallelism the residual stream and the norms have T / tp tokens. Their outputs are all-gathered for
attention, feed-forward and head, and saved that way.

Under context parallelism T counts the local tokens. Ring attention saves what one process saves of them.
Ulysses saves Q more, because the attention output is a new tensor after the all-to-all, and has at least one
key head per rank. The buffers of a ring live inside one operation and are in no snapshot.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from meshwright.layout.parameters import FLOAT32_BYTES, operand_bytes, residual_bytes
from meshwright.plan.memory.feed_forward import FeedForwardSizes, size_experts, size_feed_forward
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

NORM_TENSORS = 6
"""Tensors of the residual stream's size in a norm's backward, the gradient of the residual included."""


@dataclass(frozen=True)
class BlockPoint:
    """A point of a block's backward at which live bytes can be largest."""

    name: str
    phase: str
    """``MemorySnapshot.phase`` of this point."""
    saved: int
    """Live activations of the block: saved, or recomputed."""
    temporary: int
    """Other live tensors: gradients of activations, of weights that are not accumulated yet, casts."""
    new_grads: int = 0
    """Weight gradients of the block that exist by then."""
    below: int = 0
    """How many layers below the running block its phase is: 1 for the all-gather of the next block."""


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of one micro-batch's tensors in a block."""

    tokens: int
    elem_bytes: int
    """Bytes per element of GEMM operands: 2 under bf16 and fp16."""
    gathered_input: int
    """An input that sequence parallelism all-gathers: T x D x e; 0 without it."""
    residual: int
    """The residual stream: T x D x 4."""
    feed_forward: FeedForwardSizes
    """The second half, dense or MoE."""
    norm: int
    """Saved by a norm, its output excluded."""
    full: int
    """Saved without activation checkpointing, 16-bit weight copies included."""
    weight_copies: int
    """16-bit weight copies that autocast makes."""
    saved: int
    """Saved until the block's backward begins."""
    saved_formula: str
    attention_saved: int
    """Live when backward is inside attention: the first half of the block."""
    attention_grads: int
    """Gradients there: of the output, queries, keys and values."""
    attention_forward: int
    """Live while queries or keys are rotated, or exchanged by an all-to-all, in forward."""
    unread_saved: int
    """Saved GEMM outputs that are not read yet when the recomputed block reaches attention."""

    @property
    def after_experts(self) -> int:
        """Live when the backward of the block's experts is done."""
        return self.attention_saved + self.norm + self.feed_forward.after_experts

    def backward_temp(self, first: bool) -> int:
        """Temporary bytes at the largest point of the block's backward, in the feed-forward."""
        inside = self.feed_forward.first_backward_temp if first else self.feed_forward.backward_temp
        return self.residual + inside

    @classmethod
    def of(
        cls, job: Job, model: DecoderModel, micro_batch: int, feed_forward: FeedForwardSizes
    ) -> BlockSizes:
        """Sizes of a block of a rank's model with this feed-forward."""
        layout, tokens = job.layout, micro_batch * job.data.seq_len // job.layout.cp
        elem = operand_bytes(job.train.precision)
        on_gpu = job.cluster.device == "cuda"
        width, queries, keys = model.hidden_size, model.query_size, model.kv_size
        local = tokens // layout.tp if layout.sequence_parallel else tokens
        residual = local * width * residual_bytes(job.train)
        norm = _norm_bytes(model, local, on_gpu)
        ring, ulysses = (layout.cp > 1 and layout.context == name for name in ("ring", "ulysses"))
        # On GPUs keys and values are repeated for every query head in float32 and with a mask, but not by a
        # ring. Ulysses has at least one key head per rank.
        repeated = on_gpu and (elem == FLOAT32_BYTES or job.data.mask == "document") and not ring
        attended = max(keys, layout.cp * model.head_size) if ulysses else keys
        seen = queries if repeated else attended
        attention = (2 * queries + 2 * seen) * elem + model.num_heads * FLOAT32_BYTES
        # After the all-to-all the attention output is a new tensor, and so are repeated keys and values.
        exchanged = (queries + (2 * attended if repeated else 0)) * elem if ulysses else 0
        # GEMMs read 16-bit weight copies; under ZeRO-2 and 3 these are the all-gathered parameters.
        copied = elem != FLOAT32_BYTES and layout.zero < 2
        copies = 2 * width * (queries + keys) * elem * copied + feed_forward.weight_copies
        # Norms read 16-bit all-gathered weights in float32.
        vectors = 2 if model.norm == "layer" else 1
        weight = vectors * width * FLOAT32_BYTES if elem != FLOAT32_BYTES and not copied else 0
        inputs = tokens * (width * elem + attention + exchanged)
        full = 2 * (norm + weight) + inputs + feed_forward.saved + copies
        outputs = tokens * ((2 * queries + 2 * keys) * elem + model.num_heads * FLOAT32_BYTES)
        outputs += local * width * elem + feed_forward.gemm_outputs
        saved, formula = {
            "none": (full, f"{full} per block"),
            "selective": (
                residual + outputs,
                f"{residual} (input) + {outputs} (GEMM outputs) per block",
            ),
            "full": (residual, f"{local} x {width} x {residual_bytes(job.train)} (input) per block"),
        }[layout.recompute]
        half = norm + weight + tokens * width * elem
        if copied:
            half += width * (queries + 2 * keys) * elem
        unread = saved - residual - tokens * (queries + 2 * keys) * elem
        # The all-to-all of the gradients holds them three times: produced, packed and received.
        exchanged_back = queries + 4 * attended if ulysses else 0
        forward = _attention_forward_bytes(model, elem, attended if ulysses else 0)
        return cls(
            tokens=tokens,
            elem_bytes=elem,
            gathered_input=tokens * width * elem if layout.sequence_parallel else 0,
            residual=residual,
            feed_forward=feed_forward,
            norm=norm,
            full=full,
            weight_copies=copies,
            saved=saved,
            saved_formula=formula,
            attention_saved=half + tokens * attention,
            attention_grads=tokens * max(2 * queries + 2 * seen, exchanged_back) * elem,
            attention_forward=half + tokens * forward if forward else 0,
            unread_saved=unread if layout.recompute == "selective" else 0,
        )

    def list_points(self, job: Job, backward_temp: int) -> list[BlockPoint]:
        """The points of the block's backward.

        Args:
            job: With its layout settled.
            backward_temp: Temporary bytes at the largest point of the feed-forward's backward.
        """
        recompute, fsdp, residual = job.layout.recompute != "none", job.layout.zero >= 2, self.residual
        points = [BlockPoint("backward", "block", self.full, backward_temp)]
        if fsdp and self.feed_forward.after_experts:
            saved, temporary = self.full, residual + self.feed_forward.experts_temp
            if recompute:  # experts are all-gathered by the recomputation
                saved, temporary = self.after_experts + self.unread_saved, residual
            points.append(BlockPoint("experts all-gather", "experts unshard", saved, temporary))
            points.append(BlockPoint("experts reduce", "experts", self.after_experts, residual))
        temporary = residual + self.attention_grads
        points.append(BlockPoint("attention, backward", "attention", self.attention_saved, temporary))
        if recompute:
            saved = self.attention_forward + self.unread_saved
            points.append(BlockPoint("recompute", "recompute", saved, residual))
        return points


def _norm_bytes(model: DecoderModel, tokens: int, on_gpu: bool) -> int:
    """A norm saves its float32 input and statistics; RMSNorm on CPU, several operators, its result too."""
    width = model.hidden_size
    if model.norm == "layer":
        return tokens * (width + 2) * FLOAT32_BYTES
    return tokens * ((1 if on_gpu else 2) * width + 1) * FLOAT32_BYTES


def rope_peak_bytes(model: DecoderModel, elem: float) -> float:
    """Most bytes per token of queries, keys and values while RoPE runs, on the queries or on the keys.

    It holds its input, the swapped half and three float32 products with its tables.

    Args:
        model: As the rank has it.
        elem: Bytes per element.
    """
    queries, keys, rotated = model.query_size, model.kv_size, 2 * elem + 3 * FLOAT32_BYTES
    of_queries = queries * rotated + 2 * keys * elem
    of_keys = 2 * queries * elem + keys * (rotated + elem)
    return max(of_queries, of_keys)


def _attention_forward_bytes(model: DecoderModel, elem: int, exchanged_keys: int) -> int:
    """Bytes per token of queries, keys and values while RoPE or an all-to-all of Ulysses runs.

    The all-to-all holds queries, keys and values as made, repeated, packed and received; or received with the
    attention output three times: as made, packed and received.

    Args:
        model: As the rank has it.
        elem: Bytes per element.
        exchanged_keys: Width of the exchanged keys; 0 without Ulysses.
    """
    queries, keys = model.query_size, model.kv_size
    largest = int(rope_peak_bytes(model, elem)) if model.positions == "rope" else 0
    if exchanged_keys:
        packed = queries + 2 * exchanged_keys
        repeated = 2 * exchanged_keys if exchanged_keys > keys else 0
        exchange = queries + 2 * keys + packed + max(packed + repeated, 3 * queries)
        largest = max(largest, exchange * elem)
    return largest


class SizedBlock(Protocol):
    """A block of any backend, as far as a sequence of blocks reads it."""

    @property
    def saved(self) -> int:
        """Saved until the block's backward begins."""

    @property
    def saved_formula(self) -> str:
        """The same as a sum per block."""


B = TypeVar("B", bound=SizedBlock)


@dataclass(frozen=True)
class BlockSequence(Generic[B]):
    """The blocks of a model or of a pipeline stage, first to last; identical blocks are one object."""

    blocks: tuple[B, ...]

    def replace(self, change: Callable[[B], B]) -> BlockSequence[B]:
        """The sequence with every block changed; equal blocks stay one object."""
        changed = {id(block): change(block) for block in self.blocks}
        return BlockSequence(tuple(changed[id(block)] for block in self.blocks))

    def find_extremes(self, window: int = 0) -> set[int]:
        """The layers whose snapshots in backward can be the largest.

        Along a run of equal blocks the bytes of a snapshot are linear in the layer. So the largest is at an
        end of the run, and of equal ones the first.

        Args:
            window: Layers at either end of a run where bytes are not linear, because of neighbours.
        """
        found: set[int] = set()
        for _, run in itertools.groupby(range(len(self.blocks)), key=lambda layer: id(self.blocks[layer])):
            layers = list(run)
            found.update(layers[: window + 1], layers[-window - 1 :])
        return found

    @property
    def last(self) -> B:
        """The last block; tensors outside of blocks have the same size for all."""
        return self.blocks[-1]

    @functools.cached_property
    def _sums(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((block.saved for block in self.blocks), initial=0))

    def saved(self, count: int | None = None) -> int:
        """Saved by the first blocks, or by all of them, until their backward begins."""
        return self._sums[-1 if count is None else count]

    def formula(self, count: int | None = None) -> str:
        """The same as a sum."""
        count = len(self.blocks) if count is None else count
        first, last = self.blocks[0], self.blocks[max(0, count - 1)]
        if first.saved == last.saved:
            return f"{count} blocks, {first.saved_formula}"
        dense = sum(block.saved == first.saved for block in self.blocks[:count])
        return f"{dense} blocks, {first.saved_formula}, {count - dense} blocks, {last.saved_formula}"


def size_blocks(
    job: Job,
    model: DecoderModel,
    layers: range,
    micro_batch: int,
    rows: Sequence[int] | None = None,
) -> BlockSequence[BlockSizes]:
    """Sizes of some layers of a rank's model.

    Args:
        job: With its layout settled.
        model: As the rank has it.
        layers: Which.
        micro_batch: Samples of one forward pass.
        rows: Rows that experts read in each MoE layer; None for an even share.
    """
    first = model.dense_layers if model.num_experts else model.num_layers
    routed, found = max(0, len(layers) - max(0, first - layers.start)), []
    if routed < len(layers):
        dense = size_feed_forward(job, model, micro_batch)
        found = [BlockSizes.of(job, model, micro_batch, dense)] * (len(layers) - routed)
    if rows is None and routed:
        experts = size_experts(job, model, micro_batch)
        found += [BlockSizes.of(job, model, micro_batch, experts)] * routed
    for read in rows or ():
        experts = size_experts(job, model, micro_batch, read)
        found.append(BlockSizes.of(job, model, micro_batch, experts))
    assert len(found) == len(layers), "rows are given for every MoE layer"
    return BlockSequence(tuple(found))
