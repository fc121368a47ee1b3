"""What a decoder's step holds, moment by moment; walks the points at which an eager step can be largest.

With T tokens in a micro-batch, D hidden, Q and K the widths of all query and key heads, F feed-forward, H
heads, V vocabulary and e bytes an element (2 under bf16 and fp16, else 4), a Llama-shaped block keeps on
CPU::

    T x (2 x ((2 D + 1) x 4 + D e)  +  (2 Q + 2 K) e + 4 H  +  4 F e)
         two norms                     attention               feed-forward

and in 16 bits also a copy of its matrices. On GPUs an RMSNorm is one kernel and keeps D instead of 2 D, as
LayerNorm does everywhere; in float32 attention keeps 2 Q for its 2 K there. What the second half of a block
holds, dense or with experts, is in ``feed_forward_memory``.

Recomputation ``full`` keeps T x D x 4 a block, ``selective`` also the products' outputs: T x ((2 Q + 2 K + D)
e + 4 H + 2 F e). Either way one whole block lives while its backward pass runs.

The loss holds the logits of a chunk of tokens twice in float32, and makes the head's gradient (V x D x 4) in
the forward pass.

With tensor parallelism the model is the narrower one that a rank holds (``plan.tensor``). With sequence
parallelism the residual stream and the norms have T / tp tokens; what they hand to attention, feed-forward
and head is gathered, and is kept gathered. The loss then holds a chunk's logits once.

Where ``cp`` ranks share a sequence T is a rank's own tokens. A ring keeps what one process keeps of them.
Ulysses keeps Q more, as what attention gave is traded back before the next product reads it, and at least a
key head a rank. What a ring holds while it turns is inside one operation, and is not among the moments.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.layout.loss_chunks import eager_chunk
from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    Parameter,
    count_gradient_bytes,
    is_routed,
    list_block,
    operand_bytes,
    residual_bytes,
    with_gradients,
)
from meshwright.plan.contract import Line
from meshwright.plan.memory.feed_forward import (
    INT64_BYTES,
    FeedForwardSizes,
    size_experts,
    size_feed_forward,
)
from meshwright.plan.memory.snapshots import ALL_GRADS, MemorySnapshot, PersistentGrads, StepMemory
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of one micro-batch's tensors."""

    tokens: int
    low: int
    """Bytes of a matrix product's operands: 2 under bf16 and fp16."""
    gathered: int
    """What a rank receives for its part of the tokens: T x D x e with sequence parallelism, else nothing."""
    hidden: int
    """The residual stream: T x D x 4."""
    feed_forward: FeedForwardSizes
    """Of the second half, dense or with experts."""
    norm: int
    """What a norm keeps, without its output."""
    block: int
    """What a block keeps without recomputation, 16-bit copies of its weights included."""
    copies: int
    """16-bit copies of a block's weights that autocast makes."""
    waiting: int
    """What a block keeps until its backward pass begins."""
    saved_formula: str
    attention: int
    """What lives when a block's backward pass is inside attention: its first half, less the feed-forward."""
    attention_gradients: int
    """Gradients there: of the output, the queries, keys and values."""
    turning: int
    """What lives of a block while its queries or keys are turned, or traded, in the forward pass."""
    waiting_products: int
    """Kept products that are not yet read when a block is computed again."""

    @property
    def after_experts(self) -> int:
        """What lives of a block when the backward pass of its experts is done."""
        return self.attention + self.norm + self.feed_forward.after_experts

    def backward(self, first: bool) -> int:
        """What lives beside a block at the widest point of its backward pass, in the feed-forward."""
        return self.hidden + (self.feed_forward.first_backward if first else self.feed_forward.backward)

    @classmethod
    def of(
        cls, job: Job, model: DecoderModel, micro_batch: int, feed_forward: FeedForwardSizes
    ) -> BlockSizes:
        """Of a block of the model as a rank holds it, with that second half."""
        tokens = micro_batch * job.data.seq_len // job.layout.cp
        low = operand_bytes(job.train.precision)
        on_gpu = job.cluster.device == "cuda"
        width, queries, keys = model.hidden_size, model.query_size, model.kv_size
        layout = job.layout
        resident = tokens // layout.tp if layout.sequence_parallel else tokens
        hidden = resident * width * residual_bytes(job.train)
        norm = _norm_bytes(model, resident, on_gpu)
        ring, ulysses = (layout.cp > 1 and layout.context == name for name in ("ring", "ulysses"))
        # On GPUs keys and values are repeated for every query head in float32 and behind a mask; a ring keeps
        # them as they are. Ulysses has at least a key head a rank.
        repeated = on_gpu and (low == FLOAT32_BYTES or job.data.mask == "document") and not ring
        attended = max(keys, layout.cp * model.head_size) if ulysses else keys
        seen = queries if repeated else attended
        attention = (2 * queries + 2 * seen) * low + model.num_heads * FLOAT32_BYTES
        # What attention gave is another tensor when it was traded back, and repeated keys than traded ones.
        traded = (queries + (2 * attended if repeated else 0)) * low if ulysses else 0
        # Products read a copy in 16 bits; under ZeRO-2 and 3 that is what is gathered.
        copied = low != FLOAT32_BYTES and job.layout.zero < 2
        copies = 2 * width * (queries + keys) * low * copied + feed_forward.cached
        # Norms read the weights that were gathered in 16 bits in float32.
        vectors = 2 if model.norm == "layer" else 1
        weight = vectors * width * FLOAT32_BYTES if low != FLOAT32_BYTES and not copied else 0
        block = 2 * (norm + weight) + tokens * (width * low + attention + traded) + feed_forward.kept + copies
        products = tokens * ((2 * queries + 2 * keys) * low + model.num_heads * FLOAT32_BYTES)
        products += resident * width * low + feed_forward.products
        waiting = {
            "none": (block, f"{block} a block"),
            "selective": (
                hidden + products,
                f"{hidden} (input) + {products} (products) a block",
            ),
            "full": (hidden, f"{resident} x {width} x {residual_bytes(job.train)} (input) a block"),
        }[job.layout.recompute]
        half = norm + weight + tokens * width * low + tokens * attention
        if copied:
            half += width * (queries + 2 * keys) * low
        # Trading gradients back holds them three times: as they are made, sent and received.
        trading_back = queries + 4 * attended if ulysses else 0
        gradients = tokens * max(2 * queries + 2 * seen, trading_back) * low
        # Turning holds what is turned and its swapped half, and three products with the tables in float32.
        turned = 2 * low + 3 * FLOAT32_BYTES
        of_queries = queries * turned + 2 * keys * low
        of_keys = 2 * queries * low + keys * (turned + low)
        turning = max(of_queries, of_keys) if model.positions == "rope" else 0
        if ulysses:
            # Queries, keys and values, repeated, packed and received; or received, and what attention gave
            # thrice: as it is, sent and received.
            packed, more = queries + 2 * attended, 2 * attended if attended > keys else 0
            trading = queries + 2 * keys + packed + max(packed + more, 3 * queries)
            turning = max(turning, trading * low)
        turning = half - tokens * attention + tokens * turning if turning else 0
        unread = waiting[0] - hidden - tokens * (queries + 2 * keys) * low
        return cls(
            tokens,
            low,
            tokens * width * low if layout.sequence_parallel else 0,
            hidden,
            feed_forward,
            norm,
            block,
            copies,
            *waiting,
            attention=half,
            attention_gradients=gradients,
            turning=turning,
            waiting_products=unread if job.layout.recompute == "selective" else 0,
        )


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of a model, or of a stage of it, first to last."""

    blocks: tuple[BlockSizes, ...]

    @classmethod
    def of(
        cls,
        job: Job,
        model: DecoderModel,
        layers: range,
        micro_batch: int,
        rows: Sequence[int] | None = None,
    ) -> StageBlocks:
        """Of some layers of the model as a rank holds it.

        Args:
            job: With its layout settled.
            model: As the rank holds it.
            layers: Which.
            micro_batch: Samples of one forward pass.
            rows: That experts read in each layer with experts; None for an even share of all.
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
        assert len(found) == len(layers), "rows are given for every layer with experts"
        return cls(tuple(found))

    def replace(self, change: Callable[[BlockSizes], BlockSizes]) -> StageBlocks:
        """The stack with every block changed; equal blocks stay one object."""
        changed = {id(block): change(block) for block in self.blocks}
        return StageBlocks(tuple(changed[id(block)] for block in self.blocks))

    def find_extremes(self, reach: int = 0) -> set[int]:
        """The layers whose moments in the backward pass can be the largest.

        Along a run of equal blocks every moment's bytes are linear in the layer, so that the largest is at an
        end of the run, and of equal ones the first.

        Args:
            reach: Layers from either end of a run that a moment may see: there bytes are not linear.
        """
        found: set[int] = set()
        for _, run in itertools.groupby(range(len(self.blocks)), key=lambda layer: id(self.blocks[layer])):
            layers = list(run)
            found.update(layers[: reach + 1], layers[-reach - 1 :])
        return found

    @property
    def last(self) -> BlockSizes:
        """Of the last block; what is around blocks is alike in all."""
        return self.blocks[-1]

    @functools.cached_property
    def _sums(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((block.waiting for block in self.blocks), initial=0))

    def waiting(self, count: int) -> int:
        """What the first blocks keep until their backward pass begins."""
        return self._sums[count]

    def formula(self, count: int) -> str:
        """The same as a sum that can be checked."""
        first, last = self.blocks[0], self.blocks[max(0, count - 1)]
        if first.waiting == last.waiting:
            return f"{count} blocks, {first.saved_formula}"
        dense = sum(block.waiting == first.waiting for block in self.blocks[:count])
        return f"{dense} blocks, {first.saved_formula}, {count - dense} blocks, {last.saved_formula}"

    @property
    def copies(self) -> int:
        """16-bit copies of all blocks' weights."""
        return sum(block.copies for block in self.blocks)

    @property
    def touched(self) -> int:
        """What blocks keep without recomputation."""
        return sum(block.block for block in self.blocks)


def _norm_bytes(model: DecoderModel, tokens: int, on_gpu: bool) -> int:
    """A norm keeps its input in float32 and statistics; RMSNorm on CPU, not one kernel, its result too."""
    width = model.hidden_size
    if model.norm == "layer":
        return tokens * (width + 2) * FLOAT32_BYTES
    return tokens * ((1 if on_gpu else 2) * width + 1) * FLOAT32_BYTES


def trace_decoder(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
    rows: Sequence[int] | None = None,
) -> StepMemory:
    """The moments of a step.

    Args:
        job: With its layout settled.
        model: The job's model.
        parameters: Of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Which gradients live through the whole step.
        rows: That experts read in each layer with experts; None for an even share of all.
    """
    stack = StageBlocks.of(job, model, range(model.num_layers), micro_batch, rows)
    sizes = stack.last
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    loss = sizes.tokens * model.hidden_size * sizes.low + head
    snapshots = [
        _attention_forward_snapshot(parameters, stack, persistent_grads),
        _loss_snapshot(job, model, parameters, stack, persistent_grads),
        *_final_norm_snapshots(job, model, parameters, stack, persistent_grads),
        *_backward_snapshots(job, model, parameters, stack, persistent_grads),
    ]
    buffers = list_buffers(job, model, sizes, micro_batch)
    made_in_forward = sum(line.bytes for line in buffers if line.name == "document mask")
    logits = sizes.tokens * model.vocab_size * FLOAT32_BYTES
    return StepMemory(
        snapshots=tuple(snapshots),
        buffers=buffers,
        activation_bytes=embedding_bytes(job, sizes)
        + stack.waiting(model.num_layers)
        + sizes.norm
        + loss
        + made_in_forward,
        touched_bytes=stack.touched + sizes.norm + logits,
    )


def list_buffers(job: Job, model: DecoderModel, sizes: BlockSizes, micro_batch: int) -> tuple[Line, ...]:
    """What lives from the start of the forward pass to the end of the backward pass."""
    length, documents = job.data.seq_len, job.data.mask == "document"
    lines = []
    if model.positions == "rope":
        own = length // job.layout.cp
        tables = 2 * own * model.head_size * FLOAT32_BYTES
        lines.append(Line("RoPE tables", tables, f"2 x {own} x {model.head_size} x 4"))
    tensors = 2 + (documents and model.positions == "learned")
    batch, formula = tensors * sizes.tokens * INT64_BYTES, f"{tensors} x {sizes.tokens} tokens x 8"
    if documents:  # whose they are is known of whole sequences
        batch += micro_batch * length * INT64_BYTES
        formula += f" + {micro_batch * length} x 8 (documents)"
    lines.append(Line("batch", batch, formula))
    if mask := mask_bytes(job, sizes, micro_batch):
        lines.append(Line("document mask", mask, f"{micro_batch} x {length} x {length} x {sizes.low}"))
    return tuple(lines)


def embedding_bytes(job: Job, sizes: BlockSizes) -> int:
    """What a split embedding keeps: which of its rows each token is, and which tokens are not its own."""
    return sizes.tokens * (INT64_BYTES + 1) if job.layout.tp > 1 else 0


def mask_bytes(job: Job, sizes: BlockSizes, micro_batch: int) -> int:
    """The mask of a micro-batch's documents; a ring makes it piece by piece and keeps none."""
    ring = job.layout.cp > 1 and job.layout.context == "ring"
    if job.data.mask != "document" or ring:
        return 0
    return micro_batch * job.data.seq_len * job.data.seq_len * sizes.low


def loss_temp_bytes(job: Job, model: DecoderModel, sizes: BlockSizes, block_copies: int = 0) -> int:
    """What the loss makes beside the stack: chunks of logits, the head's gradient.

    Where blocks are computed again, 16-bit copies of their weights live until the forward pass ends.
    """
    head_elements = model.vocab_size * model.hidden_size
    width = sizes.tokens * model.hidden_size * sizes.low
    chunk = min(sizes.tokens, eager_chunk(job.cluster.device, model)) * model.vocab_size
    low = sizes.low if sizes.low != FLOAT32_BYTES else 0
    # A chunk's logits twice in float32; over tp once, with the 16-bit logits that they were cast from.
    each = 2 * FLOAT32_BYTES if job.layout.tp == 1 else FLOAT32_BYTES + low
    temporary = 2 * width + head_elements * FLOAT32_BYTES + chunk * each
    if sizes.gathered:  # what was gathered
        temporary += sizes.gathered // job.layout.tp
    if sizes.low != FLOAT32_BYTES:
        copy = head_elements * sizes.low
        temporary += copy + max(0, copy - chunk * (each - sizes.low))
        if job.layout.recompute != "none":
            temporary += block_copies
    return temporary


def _loss_snapshot(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    stack: StageBlocks,
    persistent_grads: PersistentGrads,
) -> MemorySnapshot:
    """The loss, in the forward pass: the whole stack waits, and the head's gradient grows."""
    temporary, norm = loss_temp_bytes(job, model, stack.last, stack.copies), stack.last.norm
    gradients = persistent_grads.count_bytes(parameters)
    formula = f"{stack.formula(model.num_layers)}, + {norm} (final norm)"
    return MemorySnapshot(
        "loss, forward", stack.waiting(model.num_layers) + norm, temporary, gradients, formula
    )


def _final_norm_snapshots(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    stack: StageBlocks,
    persistent_grads: PersistentGrads,
) -> list[MemorySnapshot]:
    """The final norm's way back while the whole stack waits; the largest where tokens are many.

    RMSNorm on CPU is not one kernel: beside the gradient of its input lie five tensors of that size.
    """
    if model.norm != "rms" or job.cluster.device == "cuda":
        return []
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    # Where sums are kept the head's gradient is among them, but for the part of a tied one.
    temporary = 6 * stack.last.hidden + (head if model.tied_embeddings or not persistent_grads.dense else 0)
    gradients = persistent_grads.count_bytes(parameters)
    waiting, formula = stack.waiting(model.num_layers), stack.formula(model.num_layers)
    return [MemorySnapshot("final norm, backward", waiting, temporary, gradients, formula)]


def _attention_forward_snapshot(
    parameters: Sequence[Parameter], stack: StageBlocks, persistent_grads: PersistentGrads
) -> MemorySnapshot:
    """The last block's attention in the forward pass."""
    gradients = persistent_grads.count_bytes(parameters)
    before, turning = len(stack.blocks) - 1, stack.last.turning
    formula = f"{stack.formula(before)}, + {turning} (half of this block)"
    alive = stack.waiting(before) + turning
    return MemorySnapshot(f"block {before}, forward", alive, 0, gradients, formula, layer=before)


def _backward_snapshots(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    stack: StageBlocks,
    persistent_grads: PersistentGrads,
) -> list[MemorySnapshot]:
    """Each block on the way back, then the embedding."""
    all_gradients = count_gradient_bytes(parameters)
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    tied = model.tied_embeddings
    beside = head if tied and persistent_grads.dense else 0  # the head's part of the shared gradient waits
    layers, made = (
        range(model.num_layers),
        PersistentGrads(not persistent_grads.dense, not persistent_grads.experts),
    )
    block_gradients, made_in = sum_block_grads(job, model, layers), sum_block_grads(job, model, layers, made)
    gradients, listed = persistent_grads.count_bytes(parameters), _list_layers(job, stack)
    done = head + sum(p.count for p in parameters if p.name.startswith("norm.")) * FLOAT32_BYTES
    shared = head if tied else 0  # complete only when the embedding's part is there
    gradients += 0 if persistent_grads.dense else done
    snapshots = []
    if job.layout.zero == 3:  # the last block, gathered when the loss is done
        top, waiting = model.num_layers - 1, stack.formula(model.num_layers)
        alive, name = stack.waiting(model.num_layers), f"block {top}, gathered"
        temporary = stack.last.hidden
        snapshots.append(MemorySnapshot(name, alive, temporary, gradients, waiting, 0, top, "gathered"))
    for layer in reversed(layers):
        if layer in listed:
            first = not persistent_grads.experts
            found = _block_snapshots(job, stack, layer, gradients, (done, done - shared), first, beside)
            snapshots += found
        done, gradients = done + block_gradients[layer], gradients + made_in[layer]
    # A tied gradient is made of two parts and their sum; the sum is the gradient unless others are kept.
    parts = 3 if tied else 1
    last = head * (parts if persistent_grads.dense else parts - 1)
    snapshots.append(
        MemorySnapshot("embedding, backward", 0, last, all_gradients, "none", done - shared, None, "around")
    )
    snapshots.append(
        MemorySnapshot("last bucket", 0, 0, all_gradients, "none", all_gradients, None, "reduced")
    )
    return snapshots


def _list_layers(job: Job, stack: StageBlocks) -> set[int]:
    """The layers whose moments are listed.

    All where buckets are compressed: what is sent then grows bucket by bucket, not linearly. Under ZeRO-2 and
    3 a moment depends on the block behind it and on those that are gathered ahead.
    """
    if job.compression.kind != "none" and job.layout.zero < 2:
        return set(range(len(stack.blocks)))
    return stack.find_extremes(prefetch_window(job) if job.layout.zero >= 2 else 0)


def prefetch_window(job: Job) -> int:
    """Blocks on either side that a moment under ZeRO-2 and 3 depends on."""
    return max(job.layout.prefetch, 1)


def _block_snapshots(
    job: Job,
    stack: StageBlocks,
    layer: int,
    gradients: int,
    complete: tuple[int, int],
    first: bool,
    beside: int,
) -> list[MemorySnapshot]:
    """One block on the way back.

    Args:
        job: With its layout settled.
        stack: The blocks.
        layer: Which.
        gradients: That exist when its backward pass begins.
        complete: Those that are complete by then, and the same without a shared one.
        first: Whether gradients of experts are made, and stay.
        beside: The head's part of a shared gradient, which waits.
    """
    sizes, below, (done, sent) = stack.blocks[layer], stack.waiting(layer), complete
    waiting, temporary = stack.formula(layer), sizes.backward(first) + beside
    formula, alive, name = f"{waiting}, + {sizes.block} (this block)", below + sizes.block, f"block {layer}"
    cut = job.layout.zero >= 2
    snapshots = [
        MemorySnapshot(f"{name}, backward", alive, temporary, gradients, formula, sent, layer, "block")
    ]
    if cut and sizes.feed_forward.after_experts:
        snapshots += _expert_snapshots(job, layer, sizes, below, gradients, waiting)
    inside, passed = below + sizes.attention, sizes.hidden + sizes.attention_gradients
    formula = f"{waiting}, + {sizes.attention} (half of this block)"
    at = f"{name}, attention, backward"
    snapshots.append(MemorySnapshot(at, inside, passed, gradients, formula, sent, layer, "attention"))
    if job.layout.recompute != "none":
        alive, at = below + sizes.turning + sizes.waiting_products, f"{name}, recompute"
        snapshots.append(MemorySnapshot(at, alive, sizes.hidden, gradients, formula, sent, layer, "again"))
    if cut:
        at = f"{name}, reduced"
        snapshots.append(MemorySnapshot(at, below, sizes.hidden, gradients, waiting, done, layer, "reduced"))
    return snapshots


def _expert_snapshots(
    job: Job, layer: int, sizes: BlockSizes, below: int, gradients: int, formula: str
) -> list[MemorySnapshot]:
    """A block's experts where they may be a group of their own: when they are gathered, and when reduced."""
    after = below + sizes.after_experts
    alive, passed = below + sizes.block, sizes.hidden + sizes.feed_forward.passed
    if job.layout.recompute != "none":  # they are gathered when they are computed again
        alive, passed = after + sizes.waiting_products, sizes.hidden
    name = f"block {layer}, experts"
    return [
        MemorySnapshot(f"{name} gathered", alive, passed, gradients, formula, 0, layer, "experts gathered"),
        MemorySnapshot(f"{name} reduced", after, sizes.hidden, gradients, formula, 0, layer, "experts"),
    ]


def sum_block_grads(
    job: Job, model: DecoderModel, layers: Sequence[int], of: PersistentGrads = ALL_GRADS
) -> dict[int, int]:
    """Bytes of the gradients of each block, or of some of them, by its number."""
    kinds: dict[bool, int] = {}
    sums = {}
    for layer in layers:
        routed = is_routed(model, layer)
        if routed not in kinds:
            kinds[routed] = of.count_bytes(with_gradients(job, list_block(model, layer)))
        sums[layer] = kinds[routed]
    return sums
