"""Bytes of one micro-batch's tensors in a Triton block, exact to the byte (``models.kernels``).

With T tokens per micro-batch, D the hidden size, Q and K the widths of all query and key heads, H heads, F
the feed-forward size, e bytes of GEMM operands and r of the residual stream, a block saves for backward::

    selective  T x (2 (r D + 4) + (Q + 2 K) e + Q e + 4 H + 2 F e)
                    both norms    q, k, v       attention   gate, up
    none       the same, and T x (2 D e + F e); in fp8 nothing more, as weight gradients do not read fp8
    full       T x r D, its input; backward first recomputes what selective saves

In backward an autograd node frees what it saved when it is done. So a block has four points, each the largest
one of a node. None of this depends on a compiler. The workspaces of attention kernels are counted beside it:
float32 sums for the gradient of queries, and gradients of keys and values for every query head where query
heads share keys. Not counted: a norm's partial sums over tokens (at most a row per resident program) and fp8
scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    FP8_ALIGNED,
    matrix_gradient_bytes,
    operand_bytes,
    residual_bytes,
    runs_in_fp8,
)
from meshwright.plan.memory.block import BlockPoint
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class _Linear:
    """One linear layer of a block, or several merged ones."""

    outputs: int
    inputs: int
    fp8: bool
    """Whether its GEMMs run in fp8."""
    fp8_weight_grad: bool
    """Whether the GEMM of its weight gradient does."""
    tokens: int
    weight_grad: int
    """Bytes of its weight gradient."""

    @classmethod
    def of(cls, job: Job, outputs: Sequence[int], inputs: int, tokens: int) -> _Linear:
        """A layer of a job's block; in fp8 if each of the merged ones can be."""
        fp8 = all(runs_in_fp8(job, rows, inputs) for rows in outputs)
        exact = not job.train.fp8_weight_grads or tokens % FP8_ALIGNED
        weight_grad = sum(outputs) * inputs * matrix_gradient_bytes(job)
        return cls(sum(outputs), inputs, fp8, fp8 and not exact, tokens, weight_grad)

    @property
    def input_grad_casts(self) -> int:
        """fp8 casts for the input gradient: the output gradient and the weight."""
        return (self.tokens + self.inputs) * self.outputs if self.fp8 else 0

    @property
    def weight_grad_peak(self) -> int:
        """The weight gradient while it is computed, with the fp8 casts of both operands."""
        casts = self.tokens * (self.outputs + self.inputs) if self.fp8_weight_grad else 0
        return self.weight_grad + casts


@dataclass(frozen=True)
class TritonBlock:
    """Bytes of one micro-batch's tensors in a Triton block."""

    residual: int
    """The residual's gradient at the embedding: T x D x r; a deterministic run casts it to float32 there."""
    final_norm: int
    """Saved by the final norm."""
    saved: int
    """Saved for backward."""
    saved_formula: str
    points: tuple[BlockPoint, ...]

    @classmethod
    def of(cls, job: Job, model: DecoderModel, micro_batch: int) -> TritonBlock:
        """Sizes of a block of the model."""
        tokens, recompute = micro_batch * job.data.seq_len, job.layout.recompute
        elem, wide = operand_bytes(job.train.precision), residual_bytes(job.train)
        width, queries, keys, inner = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
        heads, row = queries + 2 * keys, tokens * elem
        qkv = _Linear.of(job, (queries, keys, keys), width, tokens)
        out = _Linear.of(job, (width,), queries, tokens)
        gate_up = _Linear.of(job, (inner, inner), width, tokens)
        down = _Linear.of(job, (width,), inner, tokens)
        norm = tokens * (wide * width + FLOAT32_BYTES)
        # Saved by "none"; otherwise backward recomputes them.
        saved_normed = row * width if recompute == "none" and not qkv.fp8 else 0
        saved_inner = row * (width + inner) if recompute == "none" and not gate_up.fp8 else 0
        attention = row * queries + tokens * model.num_heads * FLOAT32_BYTES
        first_half = norm + saved_normed + row * heads + attention
        second_half = norm + saved_inner + row * 2 * inner
        full = first_half + second_half
        saved = tokens * wide * width if recompute == "full" else full
        # The residual's gradient, also cast for GEMMs where the precision differs. A norm's backward makes a
        # new one.
        cast_grad = row * width if wide != elem else 0
        residual_grad = tokens * wide * width + cast_grad
        inner_again = 0 if saved_inner else row * inner
        normed_again = 0 if saved_inner else row * width
        gate_up_grads = row * 2 * inner
        feed_forward = (
            row * inner + down.input_grad_casts,
            row * inner + gate_up_grads + inner_again,
            gate_up_grads + inner_again + down.weight_grad_peak,
            gate_up_grads
            + down.weight_grad
            + row * width
            + max(gate_up.input_grad_casts, residual_grad + normed_again),
            gate_up_grads + down.weight_grad + residual_grad + normed_again + gate_up.weight_grad_peak,
        )
        # Gradients of q, k, v before and after the backward of RoPE.
        rotated = row * 2 * heads
        normed_again = 0 if saved_normed else row * width
        projections = (
            rotated + row * width + max(qkv.input_grad_casts, residual_grad + normed_again),
            rotated + residual_grad + normed_again + qkv.weight_grad_peak,
        )
        workspace = tokens * (queries + model.num_heads) * FLOAT32_BYTES
        workspace += 2 * row * queries if keys < queries else 0
        ffn_grads, wide_grad = gate_up.weight_grad + down.weight_grad, residual_grad - cast_grad
        cast = FLOAT32_BYTES if job.train.deterministic and wide != FLOAT32_BYTES else 0
        return cls(
            residual=tokens * width * (wide + cast),
            final_norm=norm,
            saved=saved,
            saved_formula=f"{tokens} tokens x {saved // tokens}",
            points=(
                BlockPoint("backward", "block", full, residual_grad + max(feed_forward)),
                BlockPoint(
                    "attention output, backward",
                    "attention",
                    first_half,
                    residual_grad + row * queries + max(out.input_grad_casts, out.weight_grad_peak),
                    ffn_grads,
                ),
                BlockPoint(
                    "attention, backward",
                    "attention",
                    first_half,
                    wide_grad + row * (queries + heads) + workspace,
                    ffn_grads + out.weight_grad,
                ),
                BlockPoint(
                    "q, k, v projections, backward",
                    "attention",
                    norm + saved_normed,
                    wide_grad + max(projections),
                    ffn_grads + out.weight_grad,
                ),
            ),
        )
