"""Walks the step of a dense decoder with compiled blocks on a GPU.

Triton blocks are counted in ``triton_block``. For torch's compiler this is a model of what it saves, not
exact to the byte as ``decoder`` is. With T tokens per micro-batch, D the hidden size, Q and K the widths of
all query and key heads, H heads, F the feed-forward size, V the vocabulary, e bytes of GEMM operands and r of
the residual stream, a block with SwiGLU saves for backward::

    selective  T x (r D + (Q + 2 K) e + (Q e + 4 H) + D e + 2 F e)
                    input  q, k, v       attention    wo    gate, up
    none       the same, and T x ((Q + K) e + 2 (D e + 4) + F e)
                                  RoPE        two norms     input of down

The partitioner (torch's ``min_cut_rematerialization_partition``) saves the inputs of backward GEMMs and of
attention, and recomputes what fuses into other loops. Values are a view of the output of the merged q, k, v
GEMM, which lives as long as they do; without a merged GEMM, ``none`` saves K e instead of (Q + 2 K) e. With
torch 2.13 on CPU, blocks save that to the byte.

Also live: 16-bit copies of all weights but the embedding, from step to step; in the loss, a chunk of 16-bit
logits (two in float32, where the gradient does not overwrite the logits), its input and that gradient, and
the head's gradient in float32; at the largest point of a block's backward, tensors inside its feed-forward: T
x 4 F e, without activation checkpointing T x 2 F e. Weight gradients are float32, or of ``train.grad_dtype``,
and live from where they are computed.
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
    list_parameters,
    operand_bytes,
    residual_bytes,
)
from meshwright.plan.contract import Line
from meshwright.plan.memory.block import BlockPoint, BlockSequence
from meshwright.plan.memory.decoder import head_bytes, walk_backward
from meshwright.plan.memory.snapshots import MemorySnapshot, PersistentGrads, StepMemory
from meshwright.plan.memory.triton_block import TritonBlock
from meshwright.plan.memory.walker import StepWalker
from meshwright.spec.execution import uses_bf16_weight_copies, uses_fused_kernels, uses_triton_blocks
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def is_compiled(job: Job) -> bool:
    """Whether this module describes the job's step."""
    model, layout = job.model, job.layout
    if not isinstance(model, DecoderModel):
        return False
    is_dense_causal = model.num_experts is None and model.attention == "heads" and model.window is None
    is_dense_causal = is_dense_causal and job.data.mask == "causal"
    whole = layout.pp * layout.tp * layout.cp == 1 and layout.zero < 2
    known = job.train.precision in ("fp32", *LOW_BYTES)
    return is_dense_causal and whole and known and uses_fused_kernels(job)


def has_exact_peak(job: Job) -> bool:
    """Whether the peak of a compiled step is exact: it does not depend on torch's compiler."""
    return is_compiled(job) and uses_triton_blocks(job)


@dataclass(frozen=True)
class CompiledBlock:
    """Bytes of one micro-batch's tensors in a block that torch compiles."""

    residual: int
    """The residual stream: T x D x r."""
    saved: int
    """Saved for backward."""
    saved_formula: str
    points: tuple[BlockPoint, ...]
    """Points of its backward pass: in the feed-forward, and in attention."""

    @classmethod
    def of(cls, job: Job, model: DecoderModel, micro_batch: int) -> CompiledBlock:
        """Sizes of a block of the model."""
        tokens, recompute = micro_batch * job.data.seq_len, job.layout.recompute
        elem, wide = operand_bytes(job.train.precision), residual_bytes(job.train)
        width, queries, keys, inner = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
        gate_up = (2 if model.activation == "swiglu" else 1) * inner
        rotated = (queries + keys) * elem if model.positions == "rope" else 0
        attended = queries * elem + model.num_heads * FLOAT32_BYTES
        always = wide * width + attended + (width + gate_up) * elem
        qkv = (queries + 2 * keys) * elem
        statistics = (1 if model.norm == "rms" else 2) * FLOAT32_BYTES
        merged = uses_bf16_weight_copies(job) and not model.attention_bias
        unrotated = qkv if merged or not rotated else keys * elem
        none = always + unrotated + rotated + 2 * (width * elem + statistics) + inner * elem
        saved = {"none": none, "selective": always + qkv, "full": wide * width}[recompute]
        # Full checkpointing recomputes the whole block first, selective each tensor where it is read.
        live = always + qkv if recompute == "selective" else none
        # Gradients of the inner product and of its factors. The input of down is recomputed in the same loop.
        # Where it was saved, it is freed with the residual's gradient when down's weight gradient is made.
        grads = (inner + gate_up) * elem + (-inner * elem if recompute == "none" else inner * elem)
        down = width * inner * FLOAT32_BYTES
        rounded = width * elem if wide != elem else 0  # the residual's gradient, cast for GEMMs
        cast = 0
        if elem != FLOAT32_BYTES and not uses_bf16_weight_copies(job):
            cast = (2 * width * (queries + keys) + (gate_up + inner) * width) * elem
        attention = wide * width + attended + qkv + rotated + rounded + (2 * queries + 2 * keys) * elem
        inside = tokens * grads + (down if recompute == "none" else tokens * rounded)
        weight_grads, residual = down * (gate_up + inner) // inner, tokens * wide * width
        return cls(
            residual=residual,
            saved=tokens * saved + cast,
            saved_formula=f"{tokens} tokens x {saved}" + (f" + {cast} (cast weights)" if cast else ""),
            points=(
                BlockPoint("backward", "block", tokens * live + cast, residual + inside),
                BlockPoint(
                    "attention, backward", "attention", tokens * attention + cast, residual + weight_grads
                ),
            ),
        )

    @property
    def final_norm(self) -> int:
        """Saved by the final norm."""
        return self.residual


def walk_compiled(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
    eager: StepMemory,
) -> StepMemory:
    """The step of a compiled decoder.

    Args:
        job: One that :func:`is_compiled`, with its layout settled.
        model: The job's model.
        parameters: Parameters of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Which gradients live through the whole step.
        eager: The eager step, whose buffers are the same.
    """
    snapshots = list_compiled_snapshots(job, model, parameters, micro_batch, persistent_grads)
    tokens, elem = micro_batch * job.data.seq_len, operand_bytes(job.train.precision)
    loss = tokens * elem * model.hidden_size + head_bytes(model)
    return StepMemory(snapshots, eager.buffers, snapshots[0].activations + loss, eager.touched_bytes)


def list_compiled_snapshots(
    job: Job,
    model: DecoderModel,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
) -> tuple[MemorySnapshot, ...]:
    """The snapshots of :func:`walk_compiled`."""
    block = (TritonBlock if uses_triton_blocks(job) else CompiledBlock).of(job, model, micro_batch)
    blocks = BlockSequence[CompiledBlock | TritonBlock]((block,) * model.num_layers)
    tokens, elem = micro_batch * job.data.seq_len, operand_bytes(job.train.precision)
    head, inputs = model.vocab_size * model.hidden_size, tokens * model.hidden_size * elem
    walker = StepWalker(blocks.saved(), gradients=persistent_grads.count_bytes(parameters))
    chunk = min(tokens, loss_chunk(job, model)) * model.vocab_size
    buffers = 1 if writes_grad_in_logits(job) else 2
    loss = 2 * inputs + head * FLOAT32_BYTES + buffers * chunk * elem
    loss += 0 if uses_bf16_weight_copies(job) or elem == FLOAT32_BYTES else head * elem
    formula = f"{blocks.formula()}, + {block.final_norm} (final norm)"
    walker.snapshot("loss, forward", formula, activations=block.final_norm, temporary=loss)
    # With persistent gradients the head's part of a tied gradient lives until the embedding's is made.
    tied_part = head * FLOAT32_BYTES if model.tied_embeddings and persistent_grads.dense else 0
    beside = (tied_part, block.residual)
    walk_backward(
        walker, job, model, parameters, persistent_grads, blocks, lambda layer: block.points, beside
    )
    return tuple(walker.snapshots)


def weight_copies_line(job: Job, model: DecoderModel) -> Line:
    """The 16-bit weight copies of a rank that live from step to step, of a job that keeps some."""
    copied, elem = count_copied_weights(model), operand_bytes(job.train.precision)
    return Line("bf16 weight copies", copied * elem, f"{copied} x {elem} ({job.train.precision})")


def count_copied_weights(model: DecoderModel) -> int:
    """Elements of the weights that GEMMs read, the head's included."""
    tables = {name: p.count for p in list_parameters(model) if (name := p.name) in EMBEDDINGS}
    matrices = sum(p.count for p in list_parameters(model) if len(p.shape) == 2)
    return matrices - sum(tables.values()) + (tables["embed.weight"] if model.tied_embeddings else 0)
