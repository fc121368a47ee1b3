"""Walks a decoder's step without a pipeline: forward, loss, the blocks' backward, the embedding's backward.

Eager blocks are sized in ``block``, compiled and Triton blocks in ``compiled`` and ``triton_block``. Their
backward is walked here for all of them.

The loss holds a chunk of the logits twice in float32, and computes the head's gradient (V x D x 4) in
forward. Under tensor parallelism it holds the chunk once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.layout.loss_chunks import eager_chunk
from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    INT64_BYTES,
    Parameter,
    count_gradient_bytes,
    is_routed,
    list_block,
    with_gradients,
)
from meshwright.plan.contract import Line
from meshwright.plan.memory.block import (
    NORM_TENSORS,
    B,
    BlockPoint,
    BlockSequence,
    BlockSizes,
    size_blocks,
)
from meshwright.plan.memory.snapshots import ALL_GRADS, PersistentGrads, StepMemory
from meshwright.plan.memory.walker import StepWalker
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def walk_decoder(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
    rows: Sequence[int] | None = None,
) -> StepMemory:
    """The step of an eager decoder.

    Args:
        job: With its layout settled.
        model: As the rank has it.
        parameters: Parameters of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Which gradients live through the whole step.
        rows: Rows that experts read in each MoE layer; None for an even share.
    """
    blocks = size_blocks(job, model, range(model.num_layers), micro_batch, rows)
    sizes, head = blocks.last, head_bytes(model)
    walker = StepWalker(gradients=persistent_grads.count_bytes(parameters))
    _walk_forward(walker, job, model, blocks)
    if model.norm == "rms" and job.cluster.device == "cpu":
        # Not one kernel. The head's gradient is among persistent ones, except the part of a tied one.
        made = head if model.tied_embeddings or not persistent_grads.dense else 0
        temporary = NORM_TENSORS * sizes.residual + made
        walker.snapshot("final norm, backward", blocks.formula(), temporary=temporary)
    if job.layout.zero == 3:
        top = model.num_layers - 1
        name, at = f"block {top}, all-gather", (top, "unshard")
        walker.snapshot(name, blocks.formula(), temporary=sizes.residual, at=at)
    tied_part = head if model.tied_embeddings and persistent_grads.dense else 0

    def points(layer: int) -> list[BlockPoint]:
        block = blocks.blocks[layer]
        temporary = block.backward_temp(first=not persistent_grads.experts) + tied_part
        found = block.list_points(job, temporary)
        return found + list_fsdp_points(job, layer, block.residual) if job.layout.zero >= 2 else found

    walk_backward(walker, job, model, parameters, persistent_grads, blocks, points)
    buffers = list_buffers(job, model, sizes, micro_batch)
    loss = sizes.tokens * model.hidden_size * sizes.elem_bytes + head
    loss += mask_bytes(job, sizes, micro_batch) + embedding_bytes(job, sizes)
    return StepMemory(
        snapshots=tuple(walker.snapshots),
        buffers=buffers,
        activation_bytes=blocks.saved() + sizes.norm + loss,
        touched_bytes=sum(block.full for block in blocks.blocks) + sizes.norm + logits_bytes(model, sizes),
    )


def _walk_forward(
    walker: StepWalker, job: Job, model: DecoderModel, blocks: BlockSequence[BlockSizes]
) -> None:
    """Attention of the last block, then the loss, where all blocks' activations are live."""
    last, before = blocks.last, len(blocks.blocks) - 1
    walker.alloc(activations=blocks.saved(before))
    formula = f"{blocks.formula(before)}, + {last.attention_forward} (this block)"
    walker.snapshot(f"block {before}, forward", formula, activations=last.attention_forward, at=(before, ""))
    walker.alloc(activations=last.saved)
    temporary = loss_temp_bytes(job, model, last)
    if job.layout.recompute != "none":  # autocast keeps its weight copies until forward ends
        temporary += sum(block.weight_copies for block in blocks.blocks)
    formula = f"{blocks.formula()}, + {last.norm} (final norm)"
    walker.snapshot("loss, forward", formula, activations=last.norm, temporary=temporary)


def walk_backward(
    walker: StepWalker,
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    persistent_grads: PersistentGrads,
    blocks: BlockSequence[B],
    points: Callable[[int], Sequence[BlockPoint]],
    beside: tuple[int, int] = (0, 0),
) -> None:
    """Backward of all blocks, last to first, and of the embedding.

    Args:
        walker: After the loss, with the activations of all blocks.
        job: With its layout settled.
        model: As the rank has it.
        parameters: Parameters of the model.
        persistent_grads: Which gradients live through the whole step.
        blocks: Blocks of any backend.
        points: Points of a layer's backward.
        beside: Temporary bytes through all blocks, and in the embedding's backward.
    """
    layers, head = range(model.num_layers), head_bytes(model)
    tied, dense = model.tied_embeddings, persistent_grads.dense
    new = PersistentGrads(not dense, not persistent_grads.experts)
    block_grads, new_grads = sum_block_grads(job, model, layers), sum_block_grads(job, model, layers, new)
    outer = head + sum(p.count for p in parameters if p.name.startswith("norm.")) * FLOAT32_BYTES
    walker.ready_grads = outer - (head if tied else 0)  # a tied gradient is final after the embedding
    walker.alloc(temporary=beside[0], gradients=0 if dense else outer)
    listed = _list_layers(job, blocks)
    for layer in reversed(layers):
        walker.free(activations=blocks.blocks[layer].saved)
        if layer in listed:
            formula = blocks.formula(layer)
            for point in points(layer):
                walker.snapshot(
                    f"block {layer - point.below}, {point.name}",
                    f"{formula}, + {point.saved} (this block)",
                    activations=point.saved,
                    temporary=point.temporary,
                    gradients=0 if dense else point.new_grads,
                    at=(layer - point.below, point.phase),
                )
        walker.ready_grads += block_grads[layer]
        walker.alloc(gradients=new_grads[layer])
    everything = count_gradient_bytes(parameters)
    walker.alloc(gradients=everything - walker.gradients)
    walker.free(temporary=beside[0])
    # A tied gradient is made of two parts and their sum, which is the gradient unless gradients persist.
    parts = (3 if tied else 1) - (0 if dense else 1)
    walker.snapshot("embedding, backward", "none", temporary=head * parts + beside[1], at=(None, "root"))
    walker.ready_grads = everything
    walker.snapshot("last bucket", "none", at=(None, "reduced"))
    assert walker.activations == walker.temporary == 0, "backward frees all activations"


def list_fsdp_points(job: Job, layer: int, residual: int) -> list[BlockPoint]:
    """FSDP: a block's last gradient, its reduce-scatter, and under ZeRO-3 the all-gather of the next one."""
    points = [
        BlockPoint("last gradient", "last", 0, NORM_TENSORS * residual),
        BlockPoint("reduce-scatter", "reduced", 0, residual),
    ]
    if layer and job.layout.zero == 3:
        points.append(BlockPoint("all-gather", "unshard", 0, residual, below=1))
    return points


def _list_layers(job: Job, blocks: BlockSequence[B]) -> set[int]:
    """The layers whose snapshots are recorded.

    All where gradients are compressed: the bytes on the wire grow bucket by bucket, not linearly. Under
    ZeRO-2 and 3 a snapshot depends on the block behind it and on those that are prefetched.
    """
    if job.compression.kind != "none" and job.layout.zero < 2:
        return set(range(len(blocks.blocks)))
    return blocks.find_extremes(prefetch_window(job) if job.layout.zero >= 2 else 0)


def prefetch_window(job: Job) -> int:
    """Blocks on either side that a snapshot under ZeRO-2 and 3 depends on."""
    return max(job.layout.prefetch, 1)


def head_bytes(model: DecoderModel) -> int:
    """The head, the embedding or the gradient of either: V x D x 4."""
    return model.vocab_size * model.hidden_size * FLOAT32_BYTES


def logits_bytes(model: DecoderModel, sizes: BlockSizes) -> int:
    """All logits of a micro-batch in float32."""
    return sizes.tokens * model.vocab_size * FLOAT32_BYTES


def list_buffers(job: Job, model: DecoderModel, sizes: BlockSizes, micro_batch: int) -> tuple[Line, ...]:
    """Buffers that live from the start of forward to the end of backward."""
    length, documents = job.data.seq_len, job.data.mask == "document"
    lines = []
    if model.positions == "rope":
        local = length // job.layout.cp
        tables = 2 * local * model.head_size * FLOAT32_BYTES
        lines.append(Line("RoPE tables", tables, f"2 x {local} x {model.head_size} x 4"))
    tensors = 2 + (documents and model.positions == "learned")
    batch, formula = tensors * sizes.tokens * INT64_BYTES, f"{tensors} x {sizes.tokens} tokens x 8"
    if documents:  # document ids are of whole sequences
        batch += micro_batch * length * INT64_BYTES
        formula += f" + {micro_batch * length} x 8 (documents)"
    lines.append(Line("batch", batch, formula))
    if mask := mask_bytes(job, sizes, micro_batch):
        formula = f"{micro_batch} x {length} x {length} x {sizes.elem_bytes}"
        lines.append(Line("document mask", mask, formula))
    return tuple(lines)


def embedding_bytes(job: Job, sizes: BlockSizes) -> int:
    """Saved by a vocabulary-parallel embedding: local row indices, and the mask of other ranks' tokens."""
    return sizes.tokens * (INT64_BYTES + 1) if job.layout.tp > 1 else 0


def mask_bytes(job: Job, sizes: BlockSizes, micro_batch: int) -> int:
    """The document mask of a micro-batch; a ring makes it piece by piece and saves none."""
    ring = job.layout.cp > 1 and job.layout.context == "ring"
    if job.data.mask != "document" or ring:
        return 0
    return micro_batch * job.data.seq_len * job.data.seq_len * sizes.elem_bytes


def loss_temp_bytes(job: Job, model: DecoderModel, sizes: BlockSizes) -> int:
    """Temporary buffers of the loss: a chunk of logits, the head's gradient, its input and that gradient."""
    width = sizes.tokens * model.hidden_size * sizes.elem_bytes
    chunk = min(sizes.tokens, eager_chunk(job.cluster.device, model)) * model.vocab_size
    low = sizes.elem_bytes if sizes.elem_bytes != FLOAT32_BYTES else 0
    # Logits of the chunk twice in float32; over tp once, with the 16-bit logits that they are cast from.
    each = 2 * FLOAT32_BYTES if job.layout.tp == 1 else FLOAT32_BYTES + low
    temporary = 2 * width + head_bytes(model) + chunk * each
    temporary += sizes.gathered_input // job.layout.tp
    if low:
        copy = model.vocab_size * model.hidden_size * low
        temporary += copy + max(0, copy - chunk * (each - low))
    return temporary


def sum_block_grads(
    job: Job, model: DecoderModel, layers: Sequence[int], of: PersistentGrads = ALL_GRADS
) -> dict[int, int]:
    """Bytes of the gradients of each block, or of some of them, by layer."""
    kinds: dict[bool, int] = {}
    sums = {}
    for layer in layers:
        routed = is_routed(model, layer)
        if routed not in kinds:
            kinds[routed] = of.count_bytes(with_gradients(job, list_block(model, layer)))
        sums[layer] = kinds[routed]
    return sums
