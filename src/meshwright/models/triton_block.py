"""A Llama-shaped block as few passes over memory: products, attention, and our kernels between them.

The residual stream comes in two parts, what it was and what the last product adds to it, so that each norm
adds first and no pass does only that::

    x = embed(tokens)                         rows of a table, in the precision of the stream
    total, q, k, v = project(x, delta)        add, norm, one product, rotation
    delta = linear(attention(q, k, v))
    total, delta = feed_forward(total, delta)     add, norm, one product, silu x up, one product

Each of them has its backward pass written out. With selective recomputation they keep the stream at
both norms, queries, keys and values as attention reads them, what comes out of attention, and gate and up;
the norms' outputs and what ``down`` reads are written once more by the pass that has their parts at hand,
which costs one write of each. Without recomputation those are kept, too. No block is compiled.

Shape suffixes: N tokens, D hidden, W columns of all heads, B batch, T tokens of a sequence, H query heads,
K key heads, E head size, F feed-forward, G = 2 F, O and I outputs and inputs of a product, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.models.feed_forward import GatedFeedForward
from meshwright.models.kernels import fp8, gemm
from meshwright.models.kernels import fused as kernels
from meshwright.models.kernels.fused import GemmOperand
from meshwright.models.linear import Linear, MergedLinear
from meshwright.models.norms import RMSNorm

if TYPE_CHECKING:  # it imports this
    from meshwright.models.decoder import Block


@dataclass
class LinearGemms:
    """What products read of one matrix, or of several with the same input, one below the other."""

    weight_OI: Tensor
    """In 16 bits."""
    uses_fp8: bool
    """Whether its products are computed in 8 bits."""
    uses_fp8_weight_grad: bool
    """Whether that of the gradient of the weight is, too."""
    rows: tuple[int, ...]
    """Of each matrix."""
    grad_dtype: torch.dtype = torch.float32
    """In which the gradient of the weight is kept."""
    scale_O1: Tensor | None = None
    """Of its rows in 8 bits, as the last forward product found them: the backward pass reads the same."""

    @property
    def operand_dtype(self) -> torch.dtype:
        """Precision of what its forward product reads."""
        return fp8.E4M3 if self.uses_fp8 else self.weight_OI.dtype

    def forward(self, x: GemmOperand) -> Tensor:
        """``x W'``."""
        if x.scale is None:
            return gemm.forward(x.values, self.weight_OI)
        weight = kernels.cast_rows(self.weight_OI)
        self.scale_O1 = weight.scale
        return fp8.scaled_mm(x.values, weight.values, x.scale, weight.scale, fast=True)

    def input_grad(self, grad_NO: Tensor) -> Tensor:
        """Gradient of what it multiplied."""
        if not self.uses_fp8:
            return gemm.input_grad(grad_NO, self.weight_OI)
        assert self.scale_O1 is not None, "a forward pass went before"
        grad = kernels.cast_rows(grad_NO, by=self.scale_O1)
        assert grad.scale is not None, "it is of 8 bits"
        weight_IO = kernels.cast_transposed(self.weight_OI, self.scale_O1)
        return fp8.scaled_mm(grad.values, weight_IO, grad.scale, None, fast=fp8.BACKWARD_FAST_ACCUM)

    def uses_fp8_weight_grad_for(self, tokens: int) -> bool:
        """Whether the gradient of the weight, too, is a product in 8 bits, over so many tokens."""
        return self.uses_fp8_weight_grad and tokens % fp8.ALIGNMENT == 0

    def weight_grads(
        self, grad_NO: Tensor, x_NI: Tensor, grad_amax_O: Tensor | None = None, x_amax_I: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Of each matrix.

        Args:
            grad_NO: Of the product.
            x_NI: What it read.
            grad_amax_O: The largest of each column, where it is known.
            x_amax_I: Likewise.
        """
        if not self.uses_fp8_weight_grad_for(len(grad_NO)):
            return gemm.weight_grad(grad_NO, x_NI, self.grad_dtype).split(self.rows)
        grad, x = kernels.cast_columns(grad_NO, grad_amax_O), kernels.cast_columns(x_NI, x_amax_I)
        assert grad.scale is not None, "it is of 8 bits"
        exact = self.grad_dtype == torch.float32
        whole_OI = fp8.scaled_mm(grad.values, x.values, grad.scale, x.scale, fp8.BACKWARD_FAST_ACCUM, exact)
        return whole_OI.split(self.rows)


class _Embedding(torch.autograd.Function):
    """Rows of a table, as the stream has them."""

    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VD: Tensor, residual_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.vocab_size = len(weight_VD)
        return kernels.embedding_lookup(weight_VD, tokens_BT.flatten(), residual_dtype).unflatten(
            0, tokens_BT.shape
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        (tokens_BT,) = ctx.saved_tensors
        return None, kernels.embedding_grad(grad_BTD.flatten(0, 1), tokens_BT.flatten(), ctx.vocab_size), None


def embed(table: nn.Embedding, tokens_BT: Tensor, residual_dtype: torch.dtype) -> Tensor:
    """The residual stream of the first block.

    Args:
        table: Of all words.
        tokens_BT: Words.
        residual_dtype: Its precision.
    """
    x_BTD: Tensor = _Embedding.apply(tokens_BT, table.weight, residual_dtype)
    return x_BTD


class _NormQkvRope(torch.autograd.Function):
    """Norm of the stream and what is added to it, the product of queries, keys and values, their rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        delta_BTD: Tensor | None,
        weight_D: Tensor,
        rope: tuple[Tensor, Tensor],
        block: TritonBlock,
        *masters: Tensor,
    ) -> tuple[Tensor, ...]:
        batch, length, width = x_BTD.shape
        delta_ND = None if delta_BTD is None else delta_BTD.flatten(0, 1)
        total_ND, normal, inverse_N = kernels.add_rms_norm(
            x_BTD.flatten(0, 1), delta_ND, weight_D, block.attention_eps, block.qkv.operand_dtype
        )
        heads_BHTE = block.qkv.forward(normal).view(batch, length, -1, block.head_size).transpose(1, 2)
        queries, keys = (rows // block.head_size for rows in block.qkv.rows[:2])
        kernels.rotate_heads(heads_BHTE[:, : queries + keys], *rope)
        kept = (normal.values,) if block.keeps_gemm_inputs and normal.scale is None else ()
        ctx.save_for_backward(total_ND, inverse_N, weight_D, *rope, *kept)
        ctx.block, ctx.added = block, delta_BTD is not None
        total_BTD = x_BTD if delta_BTD is None else total_ND.view(batch, length, width)
        return total_BTD, *heads_BHTE.split((queries, keys, keys), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor, *head_grads: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, inverse_N, weight_D, cos_TE, sin_TE, *kept = ctx.saved_tensors
        gemms = ctx.block.qkv
        q, k, v = head_grads
        grad_NW = kernels.rope_backward(q, k, v, cos_TE, sin_TE)
        grads = kernels.rms_norm_backward(
            gemms.input_grad(grad_NW),
            total_ND,
            inverse_N,
            weight_D,
            grad_BTD.flatten(0, 1),
            normal=not kept,
        )
        (normal_ND,) = kept or (grads.normal_ND,)
        masters = gemms.weight_grads(grad_NW, normal_ND)
        delta_BTD = grads.delta_ND.view_as(grad_BTD) if ctx.added else None
        return grads.residual_ND.view_as(grad_BTD), delta_BTD, grads.weight_D, None, None, *masters


class _Linear(torch.autograd.Function):
    """A product whose input lies in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gemms: LinearGemms, master_OI: Tensor) -> Tensor:
        x_NI = x.flatten(0, -2)
        ctx.save_for_backward(x_NI)
        ctx.gemms = gemms
        operand = kernels.cast_rows(x_NI) if gemms.uses_fp8 else GemmOperand(x_NI)
        return gemms.forward(operand).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_NI,) = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        grad_NI = ctx.gemms.input_grad(grad_NO)
        return grad_NI.view(*grad.shape[:-1], -1), None, *ctx.gemms.weight_grads(grad_NO, x_NI)


class _FeedForward(torch.autograd.Function):
    """Norm of the stream and what is added to it, gate and up as one product, ``silu(gate) * up``, down."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, delta_BTD: Tensor, weight_D: Tensor, block: TritonBlock, *masters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total_ND, normal, inverse_N = kernels.add_rms_norm(
            x_BTD.flatten(0, 1), delta_BTD.flatten(0, 1), weight_D, block.ffn_eps, block.gate_up.operand_dtype
        )
        both_NG = block.gate_up.forward(normal)
        inner = kernels.swiglu(both_NG, block.down.operand_dtype)
        kept = (
            (normal.values, inner.values)
            if block.keeps_gemm_inputs and normal.scale is inner.scale is None
            else ()
        )
        ctx.save_for_backward(total_ND, inverse_N, weight_D, both_NG, *kept)
        del normal
        out_ND = block.down.forward(inner)
        ctx.block = block
        return total_ND.view_as(x_BTD), out_ND.view_as(delta_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor, grad_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, inverse_N, weight_D, both_NG, *kept = ctx.saved_tensors
        block, grad_out_ND = ctx.block, grad_out_BTD.flatten(0, 1)
        grad_NF = block.down.input_grad(grad_out_ND)
        inner_NF: Tensor | None
        grad_amax_G = inner_amax_F = None
        if block.gate_up.uses_fp8_weight_grad_for(len(both_NG)) and block.down.uses_fp8_weight_grad_for(
            len(both_NG)
        ):
            grad_NG, inner_NF, grad_amax_G, inner_amax_F = kernels.swiglu_backward_amax(both_NG, grad_NF)
        else:
            grad_NG, inner_NF = kernels.swiglu_backward(both_NG, grad_NF, inner=not kept)
        del grad_NF
        if kept:
            normal_ND, inner_NF = kept
        down = block.down.weight_grads(grad_out_ND, inner_NF, x_amax_I=inner_amax_F)
        del inner_NF
        grads = kernels.rms_norm_backward(
            block.gate_up.input_grad(grad_NG),
            total_ND,
            inverse_N,
            weight_D,
            grad_BTD.flatten(0, 1),
            normal=not kept,
        )
        normal_ND = normal_ND if kept else grads.normal_ND
        both = block.gate_up.weight_grads(grad_NG, normal_ND, grad_amax_O=grad_amax_G)
        grad_residual, grad_delta = grads.residual_ND.view_as(grad_BTD), grads.delta_ND.view_as(grad_BTD)
        return grad_residual, grad_delta, grads.weight_D, None, *both, *down


class _FinalNorm(torch.autograd.Function):
    """Norm of the stream and what is added to it."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, delta_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        total_ND, normal, inverse_N = kernels.add_rms_norm(
            x_BTD.flatten(0, 1), delta_BTD.flatten(0, 1), weight_D, eps, delta_BTD.dtype
        )
        ctx.save_for_backward(total_ND, inverse_N, weight_D)
        return normal.values.view_as(x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, inverse_N, weight_D = ctx.saved_tensors
        grads = kernels.rms_norm_backward(
            grad_BTD.flatten(0, 1), total_ND, inverse_N, weight_D, None, normal=False
        )
        return grads.residual_ND.view_as(grad_BTD), grads.delta_ND.view_as(grad_BTD), grads.weight_D, None


def final_norm(norm: RMSNorm, x_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
    """What the head reads.

    Args:
        norm: The last one.
        x_BTD: The residual stream.
        delta_BTD: What the last block adds to it.
    """
    normal: Tensor = _FinalNorm.apply(x_BTD, delta_BTD, norm.weight, norm.eps)
    return normal


class TritonBlock:
    """A block of a decoder that is computed so; its parameters stay where they are."""

    def __init__(self, block: Block, gradients: torch.dtype) -> None:
        """Of a block whose products have copies in 16 bits.

        Args:
            block: With RMS norms, rotations and SwiGLU, and without biases.
            gradients: Precision in which those of its matrices are kept.
        """
        attention, ffn = block.attention, block.ffn
        assert isinstance(ffn, GatedFeedForward), "the spec's uses_triton_blocks says which blocks are"
        self._attention, self._ffn = attention, ffn
        self._norms = (block.attention_norm, block.ffn_norm)
        self.attention_eps, self.ffn_eps = (norm.eps for norm in self._norms)
        self.head_size = attention.head_size
        self.keeps_gemm_inputs = block.recompute == "none"
        """Whether what products read is kept, too; in 8 bits it would not serve the gradients of weights."""
        self.qkv = _linear_gemms(attention.qkv, (attention.wq, attention.wk, attention.wv), gradients)
        self.wo = _linear_gemms(attention.wo, (attention.wo,), gradients)
        self.gate_up = _linear_gemms(ffn.gate_up, (ffn.gate, ffn.up), gradients)
        self.down = _linear_gemms(ffn.down, (ffn.down,), gradients)

    def __call__(
        self, x_BTD: Tensor, delta_BTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stream before the feed-forward, and what that adds.

        Args:
            x_BTD: The residual stream.
            delta_BTD: What is still to be added to it.
            rope: Tables of rotations.
            mask: Added to the scores of attention.
        """
        attention, ffn = self._attention, self._ffn
        weight, other_weight = (norm.weight for norm in self._norms)
        masters = [linear.weight for linear in (attention.wq, attention.wk, attention.wv)]
        x_BTD, q, k, v = _NormQkvRope.apply(x_BTD, delta_BTD, weight, rope, self, *masters)
        mixed_BTW = attention.context.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        delta_BTD = _Linear.apply(mixed_BTW, self.wo, attention.wo.weight)
        masters = [linear.weight for linear in (ffn.gate, ffn.up, ffn.down)]
        x_BTD, delta_BTD = _FeedForward.apply(x_BTD, delta_BTD, other_weight, self, *masters)
        return x_BTD, delta_BTD


def _linear_gemms(
    whole: MergedLinear | Linear | None, linears: Sequence[Linear], gradients: torch.dtype
) -> LinearGemms:
    assert whole is not None, "products that read the same input are one"
    assert whole.weight_copy is not None, "it has a copy"
    for linear in linears:
        linear.weight.grad_dtype = gradients  # else autograd casts to the master's
    rows = tuple(linear.out_features for linear in linears)
    return LinearGemms(whole.weight_copy, whole.uses_fp8, whole.uses_fp8_weight_grad, rows, gradients)
