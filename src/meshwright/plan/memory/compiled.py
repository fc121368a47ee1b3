"""What a compiled step of a dense decoder holds on a GPU, moment by moment.

Blocks that our own kernels compute are counted in ``own_memory``. Of the others the compiler decides what
they keep, so this is a model of it, not a count to the byte as in ``decoder_memory``. With T tokens in a
micro-batch, D hidden, Q and K the widths of all query and key heads, H heads, F feed-forward, V vocabulary, e
bytes of what products read and r of the residual stream, a block with SwiGLU keeps from forward to backward::

    selective  T x (r D + (Q + 2 K) e + (Q e + 4 H) + D e + 2 F e)
                    input  q, k, v       attention    wo    gate, up
    none       the same, and T x ((Q + K) e + 2 (D e + 4) + F e)
                                  turned      two norms     what down reads

as the partitioner keeps what the backward pass's products and attention read, and computes again what can
be fused into other loops (torch's ``min_cut_rematerialization_partition``). Values are a view of what one
joint product gave, which lives as long as they; where there is none, ``none`` keeps K e for (Q + 2 K) e. With
torch 2.13 on CPU, blocks keep that to the byte.

Beside that live 16-bit copies of all matrices but the embedding, from step to step; the loss's buffer of a
chunk's logits in 16 bits (two in float32 products, where the gradient does not take their place), what it
reads and the gradient of that, and the head's gradient in float32; and on the way back, at the widest point
of a block, what is made inside its feed-forward: T x 4 F e, without recomputation T x 2 F e. Gradients of
weights are float32, or as ``train.grad_dtype`` says, and each lives from where it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.loss_chunks import loss_chunk, writes_grad_in_logits
from meshwright.layout.optimizer_state import EMBEDDINGS
from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    LOW_BYTES,
    Parameter,
    count_gradient_bytes,
    list_parameters,
    operand_bytes,
    residual_bytes,
)
from meshwright.plan.contract import Line
from meshwright.plan.memory.decoder import sum_block_grads
from meshwright.plan.memory.snapshots import MemorySnapshot, PersistentGrads, StepMemory
from meshwright.plan.memory.triton_block import Point, TritonBlock
from meshwright.spec.execution import uses_bf16_weight_copies, uses_fused_kernels, uses_triton_blocks
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def is_compiled(job: Job) -> bool:
    """Whether a rank's step is the one that is described here."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel):
        return False
    plain = model.num_experts is None and model.attention == "heads" and model.window is None
    plain = plain and job.data.mask == "causal"
    whole = layout.pp * layout.tp * layout.cp == 1 and layout.zero < 2
    known = job.train.precision in ("fp32", *LOW_BYTES)
    return plain and whole and known and uses_fused_kernels(job)


def has_exact_peak(job: Job) -> bool:
    """Whether what its compiled blocks keep is not the compiler's choice: its peak is a promise."""
    return is_compiled(job) and uses_triton_blocks(job)


@dataclass(frozen=True)
class CompiledBlock:
    """Bytes of one micro-batch's tensors in a block of torch's compiler."""

    residual: int
    """The residual stream: T x D x r."""
    kept: int
    """From forward to backward."""
    formula: str
    points: tuple[Point, ...]
    """Widest ones of its backward pass: in the feed-forward, and in attention."""

    @classmethod
    def of(cls, job: Job, model: DecoderModel, micro_batch: int) -> CompiledBlock:
        """Of a block of the model."""
        tokens, recompute = micro_batch * job.data.seq_len, job.layout.recompute
        low, residual = operand_bytes(job.train.precision), residual_bytes(job.train)
        width, queries, keys, inner = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
        entered = (2 if model.activation == "swiglu" else 1) * inner
        turned = (queries + keys) * low if model.positions == "rope" else 0
        given = queries * low + model.num_heads * FLOAT32_BYTES
        around = residual * width + given + (width + entered) * low
        products = (queries + 2 * keys) * low
        statistics = (1 if model.norm == "rms" else 2) * FLOAT32_BYTES
        joint = uses_bf16_weight_copies(job) and not model.attention_bias
        unturned = products if joint or not turned else keys * low
        none = around + unturned + turned + 2 * (width * low + statistics) + inner * low
        kept = {"none": none, "selective": around + products, "full": residual * width}[recompute]
        # What full recomputation left out is made again at once, what selective left out where it is read.
        whole = around + products if recompute == "selective" else none
        # Of the product inside and its factors. Down's input is made again in the same loop; or it was kept,
        # and is let go, as the stream's gradient, when the gradient of down's matrix is made of both.
        gradients = (inner + entered) * low + (-inner * low if recompute == "none" else inner * low)
        matrix = width * inner * FLOAT32_BYTES
        rounded = width * low if residual != low else 0  # the stream's gradient, as products read it
        cast = 0
        if low != FLOAT32_BYTES and not uses_bf16_weight_copies(job):
            cast = (2 * width * (queries + keys) + (entered + inner) * width) * low
        half = residual * width + given + products + turned + rounded + (2 * queries + 2 * keys) * low
        inside = tokens * gradients + (matrix if recompute == "none" else tokens * rounded)
        matrices = matrix * (entered + inner) // inner
        return cls(
            residual=tokens * residual * width,
            kept=tokens * kept + cast,
            formula=f"{tokens} tokens x {kept}" + (f" + {cast} (cast matrices)" if cast else ""),
            points=(
                Point("", "block", tokens * whole + cast, tokens * residual * width + inside),
                Point("attention, ", "attention", tokens * half + cast, tokens * residual * width + matrices),
            ),
        )

    @property
    def last_norm(self) -> int:
        """What the last norm keeps."""
        return self.residual


def trace_compiled(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
    eager: StepMemory,
) -> StepMemory:
    """The moments of a step.

    Args:
        job: One that :func:`is_compiled`, with its layout settled.
        model: The job's model.
        parameters: Of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Which gradients live through the whole step.
        eager: The step without a compiler: the batch and tables are alike.
    """
    snapshots = list_compiled_snapshots(job, model, parameters, micro_batch, persistent_grads)
    tokens, low = micro_batch * job.data.seq_len, operand_bytes(job.train.precision)
    made = (tokens * low + model.vocab_size * FLOAT32_BYTES) * model.hidden_size
    return StepMemory(
        snapshots=snapshots,
        buffers=eager.buffers,
        activation_bytes=snapshots[0].activations + made,
        touched_bytes=eager.touched_bytes,
    )


def list_compiled_snapshots(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
) -> tuple[MemorySnapshot, ...]:
    """The loss, and the blocks on the way back; see :func:`trace_compiled`."""
    block = (TritonBlock if uses_triton_blocks(job) else CompiledBlock).of(job, model, micro_batch)
    tokens, low = micro_batch * job.data.seq_len, operand_bytes(job.train.precision)
    head, read = model.vocab_size * model.hidden_size, tokens * model.hidden_size * low
    # The loss, in the forward pass: all blocks wait, and the head's gradient grows.
    chunk = min(tokens, loss_chunk(job, model)) * model.vocab_size
    buffers = 1 if writes_grad_in_logits(job) else 2
    made = 2 * read + head * FLOAT32_BYTES + buffers * chunk * low
    made += 0 if uses_bf16_weight_copies(job) or low == FLOAT32_BYTES else head * low
    formula = f"{model.num_layers} blocks, {block.formula}, + {block.last_norm} (final norm)"
    waiting = model.num_layers * block.kept + block.last_norm
    loss = MemorySnapshot("loss, forward", waiting, made, persistent_grads.count_bytes(parameters), formula)
    return loss, *_backward_snapshots(job, model, parameters, block, persistent_grads)


def weight_copies_line(job: Job, model: DecoderModel) -> Line:
    """The 16-bit copies of a rank's matrices that live from step to step, of a job that keeps some."""
    copied, low = count_copied_weights(model), operand_bytes(job.train.precision)
    return Line("bf16 weight copies", copied * low, f"{copied} x {low} ({job.train.precision})")


def count_copied_weights(model: DecoderModel) -> int:
    """Elements of the matrices that products read, the head's among them."""
    tables = {name: p.count for p in list_parameters(model) if (name := p.name) in EMBEDDINGS}
    matrices = sum(p.count for p in list_parameters(model) if len(p.shape) == 2)
    return matrices - sum(tables.values()) + (tables["embed.weight"] if model.tied_embeddings else 0)


def _backward_snapshots(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    block: CompiledBlock | TritonBlock,
    persistent_grads: PersistentGrads,
) -> list[MemorySnapshot]:
    """Each block on the way back, at its widest points; then the embedding."""
    head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
    tied, everything = model.tied_embeddings, count_gradient_bytes(parameters)
    done = head + sum(p.count for p in parameters if p.name.startswith("norm.")) * FLOAT32_BYTES
    layers = range(model.num_layers)
    by_block, shared = sum_block_grads(job, model, layers), head if tied else 0
    beside = shared if persistent_grads.dense else 0  # the head's part of the shared gradient waits
    snapshots = []
    for layer in reversed(layers):
        below, formula = layer * block.kept, f"{layer} blocks, {block.formula}"
        snapshots += [
            MemorySnapshot(
                f"block {layer}, {point.name}backward",
                below + point.held,
                point.made + beside,
                everything if persistent_grads.dense else done + point.complete,
                f"{formula}, + {point.held} (of this block)",
                done - shared,
                layer,
                point.part,
            )
            for point in block.points
        ]
        done += by_block[layer]
    # A tied gradient is made of two parts and their sum; the sum is the gradient unless others are kept.
    parts = (3 if tied else 1) - (0 if persistent_grads.dense else 1)
    last = head * parts + block.residual
    return [
        *snapshots,
        MemorySnapshot("embedding, backward", 0, last, everything, "none", done - shared, None, "around"),
        MemorySnapshot("last bucket", 0, 0, everything, "none", everything, None, "reduced"),
    ]
