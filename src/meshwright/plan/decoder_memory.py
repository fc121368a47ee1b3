"""What a decoder's step holds, moment by moment; walks the points at which an eager step can be largest.

With T tokens in a micro-batch, D hidden, Q and K the widths of all query and key heads, F feed-forward, H
heads, V vocabulary and e bytes an element (2 under bf16 and fp16, else 4), a Llama-shaped block keeps on
CPU::

    T x (2 x ((2 D + 1) x 4 + D e)  +  (2 Q + 2 K) e + 4 H  +  4 F e)
         two norms                     attention               feed-forward

and in 16 bits also a copy of its matrices. On GPUs an RMSNorm is one kernel and keeps D instead of 2 D, as
LayerNorm does everywhere; in float32 attention keeps 2 Q for its 2 K there. GELU keeps 2 F for SwiGLU's 4 F.

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

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.moments import Line, Moment, StepMemory
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, operand_bytes
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.recipe import balance_coefficient

INT64_BYTES = 8
LOSS_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**29}
"""Logits held at once: 4 MB on a core, near its cache; 2 GiB on a GPU, which likes large products."""
LOSS_CHUNK_TOKENS = (256, 4096)
"""Tokens of a chunk: not few, as each passes over the head's gradient; not many, as fp16 sums over them."""


def loss_chunk(job: Job, model: DecoderModel) -> int:
    """Tokens whose logits the loss holds at once."""
    least, most = LOSS_CHUNK_TOKENS
    return min(most, max(least, LOSS_CHUNK_ELEMENTS[job.cluster.device] // model.vocab_size))


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch's tensors."""

    tokens: int
    low: int
    """Bytes of a matrix product's operands: 2 under bf16 and fp16."""
    gathered: int
    """What a rank receives for its part of the tokens: T x D x e with sequence parallelism, else nothing."""
    hidden: int
    """The residual stream: T x D x 4."""
    inner: int
    """One tensor inside the feed-forward: T x F x e."""
    norm: int
    """What a norm keeps, without its output."""
    block: int
    """What a block keeps without recomputation, 16-bit copies of its weights included."""
    copies: int
    """16-bit copies of a block's weights."""
    waiting: int
    """What a block keeps until its backward pass begins."""
    waiting_formula: str
    attention: int
    """What lives when a block's backward pass is inside attention: its first half, less the feed-forward."""
    attention_gradients: int
    """Gradients there: of the output, the queries, keys and values."""
    turning: int
    """What lives of a block while its queries or keys are turned, or traded, in the forward pass."""
    waiting_products: int
    """Kept products that are not yet read when a block is computed again."""

    @classmethod
    def of(cls, job: Job, model: DecoderModel, micro_batch: int) -> Sizes:
        """Of the model as a rank holds it."""
        tokens = micro_batch * job.data.seq_len // job.layout.cp
        low = operand_bytes(job.train.precision)
        on_gpu = job.cluster.device == "cuda"
        width, queries, keys, ffn = model.hidden_size, model.query_size, model.kv_size, active_ffn(model)
        gated = model.activation == "swiglu"
        layout = job.layout
        resident = tokens // layout.tp if layout.sequence_parallel else tokens
        hidden, inner = resident * width * FLOAT32_BYTES, tokens * ffn * low
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
        held = model.held_experts * model.held_expert_width + model.shared_width
        matrices = 2 * width * (queries + keys) + (3 if gated else 2) * width * (held or ffn)
        # Products read a copy in 16 bits; under ZeRO-2 and 3 that is what is gathered.
        copied = low != FLOAT32_BYTES and job.layout.zero < 2
        copies = matrices * low if copied else 0
        block = 2 * (norm + tokens * width * low) + tokens * (attention + traded) + copies
        block += (4 if gated else 2) * inner
        block += tokens * _routed_bytes(job, model, low)
        products = tokens * ((2 * queries + 2 * keys) * low + model.num_heads * FLOAT32_BYTES)
        products += resident * width * low
        if model.num_experts:  # the router's logits, and what experts answered
            products += tokens * ((model.experts_per_token or 0) * width * low + model.num_experts * 4)
        waiting = {
            "none": (block, f"{block} a block"),
            "selective": (
                hidden + products + (2 if gated else 1) * inner,
                f"{hidden} (input) + {products + (2 if gated else 1) * inner} (products) a block",
            ),
            "full": (hidden, f"{resident} x {width} x 4 (input) a block"),
        }[job.layout.recompute]
        half = norm + tokens * width * low + tokens * attention
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
            inner,
            norm,
            block,
            copies,
            *waiting,
            attention=half,
            attention_gradients=gradients,
            turning=turning,
            waiting_products=unread if job.layout.recompute == "selective" else 0,
        )


def active_ffn(model: DecoderModel) -> int:
    """Inner width that a token goes through: of a model with experts, those of its own and the shared ones.

    All layers are taken to have experts, and every expert its even share of the tokens.
    """
    if not model.num_experts:
        return model.ffn_size
    return (model.experts_per_token or 0) * model.held_expert_width + model.shared_width


def _routed_bytes(job: Job, model: DecoderModel, low: int) -> int:
    """What a token keeps for the way to its experts and back, beside what is inside them.

    For each of its experts its row, the answer, the weight and three numbers (which expert, and where the row
    lies in the two orders); the router's logits, and the auxiliary losses' gradient of them.
    """
    if not model.num_experts:
        return 0
    train = job.train
    injected = bool(balance_coefficient(train) or train.z_loss)
    each = 2 * model.hidden_size * low + FLOAT32_BYTES + 3 * INT64_BYTES
    scores = (1 + injected) * model.num_experts * FLOAT32_BYTES
    if low != FLOAT32_BYTES:  # the router reads float32, and weights are rounded
        each, scores = each + low, scores + model.hidden_size * FLOAT32_BYTES
    return (model.experts_per_token or 0) * each + scores


def _norm_bytes(model: DecoderModel, tokens: int, on_gpu: bool) -> int:
    """A norm keeps its input in float32 and statistics; RMSNorm on CPU, not one kernel, its result too."""
    width = model.hidden_size
    if model.norm == "layer":
        return tokens * (width + 2) * FLOAT32_BYTES
    return tokens * ((1 if on_gpu else 2) * width + 1) * FLOAT32_BYTES


def trace_decoder(
    job: Job, model: DecoderModel, parameters: Sequence[Parameter], micro_batch: int, sums_kept: bool
) -> StepMemory:
    """The moments of a step.

    Args:
        job: With its layout settled.
        model: The job's model.
        parameters: Of the model.
        micro_batch: Samples of one forward pass.
        sums_kept: Whether gradients live through the whole step (DDP's buckets, accumulation).
    """
    sizes = Sizes.of(job, model, micro_batch)
    stack = sizes.waiting * model.num_layers
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    loss = sizes.tokens * model.hidden_size * sizes.low + head
    moments = [
        _turning_moment(model, parameters, sizes, sums_kept),
        _loss_moment(job, model, parameters, sizes, sums_kept),
        *_final_norm_moments(job, model, parameters, sizes, sums_kept),
        *_backward_moments(
            model, parameters, sizes, sums_kept, job.layout.recompute != "none", job.layout.zero >= 2
        ),
    ]
    always = list_always(job, model, sizes, micro_batch)
    made_in_forward = sum(line.bytes for line in always if line.name == "document mask")
    logits = sizes.tokens * model.vocab_size * FLOAT32_BYTES
    return StepMemory(
        moments=tuple(moments),
        always=always,
        kept_bytes=stack + sizes.norm + loss + made_in_forward,
        touched_bytes=sizes.block * model.num_layers + sizes.norm + logits,
    )


def list_always(job: Job, model: DecoderModel, sizes: Sizes, micro_batch: int) -> tuple[Line, ...]:
    """What lives from the start of the forward pass to the end of the backward pass."""
    length, documents = job.data.seq_len, job.data.mask == "document"
    lines = []
    if model.positions == "rope":
        own = length // job.layout.cp
        tables = 2 * own * model.head_size * FLOAT32_BYTES
        lines.append(Line("rotary tables", tables, f"2 x {own} x {model.head_size} x 4"))
    tensors = 2 + (documents and model.positions == "learned")
    batch, formula = tensors * sizes.tokens * INT64_BYTES, f"{tensors} x {sizes.tokens} tokens x 8"
    if documents:  # whose they are is known of whole sequences
        batch += micro_batch * length * INT64_BYTES
        formula += f" + {micro_batch * length} x 8 (documents)"
    lines.append(Line("batch", batch, formula))
    if mask := mask_bytes(job, sizes, micro_batch):
        lines.append(Line("document mask", mask, f"{micro_batch} x {length} x {length} x {sizes.low}"))
    return tuple(lines)


def mask_bytes(job: Job, sizes: Sizes, micro_batch: int) -> int:
    """The mask of a micro-batch's documents; a ring makes it piece by piece and keeps none."""
    ring = job.layout.cp > 1 and job.layout.context == "ring"
    if job.data.mask != "document" or ring:
        return 0
    return micro_batch * job.data.seq_len * job.data.seq_len * sizes.low


def loss_temporary(job: Job, model: DecoderModel, sizes: Sizes, layers: int) -> int:
    """What the loss makes beside the stack of so many blocks: chunks of logits, the head's gradient."""
    head_elements = model.vocab_size * model.hidden_size
    width = sizes.tokens * model.hidden_size * sizes.low
    chunk = min(sizes.tokens, loss_chunk(job, model)) * model.vocab_size
    copies = 2 if job.layout.tp == 1 else 1
    temporary = 2 * width + head_elements * FLOAT32_BYTES + chunk * copies * FLOAT32_BYTES
    if sizes.gathered:  # what was gathered
        temporary += sizes.gathered // job.layout.tp
    if sizes.low != FLOAT32_BYTES:
        copy = head_elements * sizes.low
        temporary += copy + max(0, copy - chunk * (2 * FLOAT32_BYTES - sizes.low))
        if job.layout.recompute != "none":  # the blocks' copies live until the forward pass ends
            temporary += sizes.copies * layers
    return temporary


def _loss_moment(
    job: Job, model: DecoderModel, parameters: Sequence[Parameter], sizes: Sizes, sums_kept: bool
) -> Moment:
    """The loss, in the forward pass: the whole stack waits, and the head's gradient grows."""
    temporary = loss_temporary(job, model, sizes, model.num_layers)
    gradients = sum(p.count for p in parameters) * FLOAT32_BYTES if sums_kept else 0
    activations = sizes.waiting * model.num_layers + sizes.norm
    formula = f"{model.num_layers} blocks, {sizes.waiting_formula}, + {sizes.norm} (final norm)"
    return Moment("loss, forward", activations, temporary, gradients, formula)


def _final_norm_moments(
    job: Job, model: DecoderModel, parameters: Sequence[Parameter], sizes: Sizes, sums_kept: bool
) -> list[Moment]:
    """The final norm's way back while the whole stack waits; the largest where tokens are many.

    RMSNorm on CPU is not one kernel: beside the gradient of its input lie five tensors of that size.
    """
    if model.norm != "rms" or job.cluster.device == "cuda":
        return []
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    # Where sums are kept the head's gradient is among them, but for the part of a tied one.
    temporary = 6 * sizes.hidden + (head if model.tied_embeddings or not sums_kept else 0)
    gradients = sum(p.count for p in parameters) * FLOAT32_BYTES if sums_kept else 0
    formula = f"{model.num_layers} blocks, {sizes.waiting_formula}"
    stack = sizes.waiting * model.num_layers
    return [Moment("final norm, backward", stack, temporary, gradients, formula)]


def _turning_moment(
    model: DecoderModel, parameters: Sequence[Parameter], sizes: Sizes, sums_kept: bool
) -> Moment:
    """The last block's attention in the forward pass."""
    gradients = sum(p.count for p in parameters) * FLOAT32_BYTES if sums_kept else 0
    before = model.num_layers - 1
    formula = f"{before} blocks, {sizes.waiting_formula}, + {sizes.turning} (half of this block)"
    return Moment(
        f"block {before}, forward",
        sizes.waiting * before + sizes.turning,
        0,
        gradients,
        formula,
        layer=before,
    )


def backward_temporary(model: DecoderModel, sizes: Sizes, cut: bool) -> int:
    """What lives beside a block at the widest point of its backward pass, which is in the feed-forward.

    Beside the residual's gradient, that of the inner product with the down matrix's; or, where a product has
    two factors, with one more inner gradient.
    """
    held = model.held_experts * model.held_expert_width or model.ffn_size
    down = held * model.hidden_size * (sizes.low if cut else FLOAT32_BYTES)
    gated = sizes.inner if model.activation == "swiglu" else 0
    # A cut block keeps all its gradients until they are reduced together.
    widest = down + max(gated, sizes.gathered) if cut else max(gated, down + sizes.gathered)
    return sizes.hidden + sizes.inner + widest


def _backward_moments(
    model: DecoderModel,
    parameters: Sequence[Parameter],
    sizes: Sizes,
    sums_kept: bool,
    recomputed: bool,
    cut: bool,
) -> list[Moment]:
    """Each block on the way back, then the embedding."""
    all_gradients = sum(p.count for p in parameters) * FLOAT32_BYTES
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    temporary = backward_temporary(model, sizes, cut)
    tied = model.tied_embeddings
    if tied and sums_kept:  # the head's part of the shared gradient waits for the embedding's
        temporary += head
    block_gradients = sum(p.count for p in parameters if p.name.startswith("blocks.0.")) * FLOAT32_BYTES
    done = head + sum(p.count for p in parameters if p.name.startswith("norm.")) * FLOAT32_BYTES
    shared = head if tied else 0  # complete only when the embedding's part is there
    moments = []
    for layer in reversed(range(model.num_layers)):
        name = f"block {layer}, backward"
        formula = f"{layer} blocks, {sizes.waiting_formula}, + {sizes.block} (this block)"
        gradients = all_gradients if sums_kept else done
        alive = sizes.waiting * layer + sizes.block
        moments.append(Moment(name, alive, temporary, gradients, formula, done - shared, layer, "block"))
        inside, passed = sizes.waiting * layer + sizes.attention, sizes.hidden + sizes.attention_gradients
        formula = f"{layer} blocks, {sizes.waiting_formula}, + {sizes.attention} (half of this block)"
        name = f"block {layer}, attention, backward"
        moments.append(Moment(name, inside, passed, gradients, formula, done - shared, layer, "attention"))
        if recomputed:
            alive = sizes.waiting * layer + sizes.turning + sizes.waiting_products
            name = f"block {layer}, computed again"
            moments.append(
                Moment(name, alive, sizes.hidden, gradients, formula, done - shared, layer, "again")
            )
        if cut:
            name, formula = f"block {layer}, reduced", f"{layer} blocks, {sizes.waiting_formula}"
            alive = sizes.waiting * layer
            moments.append(Moment(name, alive, sizes.hidden, gradients, formula, done, layer, "reduced"))
        done += block_gradients
    # A tied gradient is made of two parts and their sum; the sum is the gradient unless others are kept.
    parts = 3 if tied else 1
    last = head * (parts if sums_kept else parts - 1)
    moments.append(
        Moment("embedding, backward", 0, last, all_gradients, "none", done - shared, None, "around")
    )
    moments.append(Moment("last bucket", 0, 0, all_gradients, "none", all_gradients, None, "reduced"))
    return moments
