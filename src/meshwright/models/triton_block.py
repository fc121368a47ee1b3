"""Triton blocks: a Llama-shaped block as GEMMs, attention and fused Triton kernels between them.

The residual stream passes between blocks as a pair, (residual, delta): the residual before a block's last
linear and the output of that linear. So each norm kernel also does the residual add in front of it::

    x = embed(tokens)                             embedding lookup, in the residual dtype
    total, q, k, v = norm_qkv_rope(x, delta)      add, norm, one GEMM, RoPE
    delta = linear(attention(q, k, v))
    total, delta = feed_forward(total, delta)     add, norm, one GEMM, SwiGLU, one GEMM

Each has an explicit backward pass. With selective activation checkpointing they save the residual stream at
both norms, the inputs and outputs of attention, and gate and up. The backward pass recomputes the norms'
outputs and the input of ``down`` in kernels that read their inputs anyway, which costs one write of each.
Without checkpointing those are saved too. No block is compiled.

Shape suffixes: N tokens, D hidden, W columns of all heads, B batch, T tokens of a sequence, H query heads,
K key heads, E head size, F feed-forward, G = 2 F, O and I outputs and inputs of a linear, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from meshwright.models.decoder import Block, Residual
from meshwright.models.feed_forward import GatedFeedForward
from meshwright.models.kernels import fp8
from meshwright.models.kernels import fused as kernels
from meshwright.models.kernels.fp8 import GemmOperand
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.linear import Linear, MergedLinear
from meshwright.models.norms import RMSNorm


@dataclass
class LinearGemms:
    """The three GEMMs of a linear layer, or of several merged ones."""

    weight_OI: Tensor
    """The 16-bit weight copy; concatenated for merged linears."""
    uses_fp8: bool
    uses_fp8_weight_grad: bool
    rows: tuple[int, ...]
    """Outputs of each merged linear."""
    grad_dtype: torch.dtype = torch.float32
    """Dtype of the weight gradient."""
    gemms: Gemms = TORCH_GEMMS
    """Compute the 16-bit GEMMs."""
    scale_O1: Tensor | None = None
    """FP8 scales of the weight's rows from the last forward pass; the backward pass uses the same."""

    @property
    def operand_dtype(self) -> torch.dtype:
        """Dtype of the input of the forward GEMM."""
        return fp8.E4M3 if self.uses_fp8 else self.weight_OI.dtype

    def forward(self, x: GemmOperand) -> Tensor:
        """``x W'``."""
        if x.scale is None:
            return self.gemms.forward(x.values, self.weight_OI)
        weight = kernels.cast_rows(self.weight_OI)
        self.scale_O1 = weight.scale
        return fp8.forward(x, weight)

    def input_grad(self, grad_NO: Tensor) -> Tensor:
        """``grad W``."""
        if not self.uses_fp8:
            return self.gemms.input_grad(grad_NO, self.weight_OI)
        assert self.scale_O1 is not None, "a forward pass came before"
        grad = kernels.cast_rows(grad_NO, by=self.scale_O1)
        return fp8.input_grad(grad, kernels.cast_transposed(self.weight_OI, self.scale_O1))

    def uses_fp8_weight_grad_for(self, tokens: int) -> bool:
        """Whether the weight gradient over this many tokens is an FP8 GEMM."""
        return self.uses_fp8_weight_grad and tokens % fp8.ALIGNMENT == 0

    def weight_grads(
        self, grad_NO: Tensor, x_NI: Tensor, grad_amax_O: Tensor | None = None, x_amax_I: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``grad' x``, split into the weight gradients of the merged linears.

        Args:
            grad_NO: Output gradient.
            x_NI: Input.
            grad_amax_O: Largest magnitude of each column, if known.
            x_amax_I: Likewise.
        """
        if not self.uses_fp8_weight_grad_for(len(grad_NO)):
            return self.gemms.weight_grad(grad_NO, x_NI, self.grad_dtype).split(self.rows)
        grad_ON, x_IN = kernels.cast_columns(grad_NO, grad_amax_O), kernels.cast_columns(x_NI, x_amax_I)
        return fp8.weight_grad(grad_ON, x_IN, exact=self.grad_dtype == torch.float32).split(self.rows)


class _Embedding(torch.autograd.Function):
    """Embedding lookup into the residual dtype."""

    @staticmethod
    def forward(ctx: Any, tokens_BT: Tensor, weight_VD: Tensor, residual_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.vocab_size = len(weight_VD)
        x_ND = kernels.embedding_lookup(weight_VD, tokens_BT.flatten(), residual_dtype)
        return x_ND.unflatten(0, tokens_BT.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        (tokens_BT,) = ctx.saved_tensors
        return None, kernels.embedding_grad(grad_BTD.flatten(0, 1), tokens_BT.flatten(), ctx.vocab_size), None


class _NormQkvRope(torch.autograd.Function):
    """Residual add, norm, the merged QKV GEMM and RoPE."""

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
        total_ND, normed, rstd_N = kernels.add_rms_norm(
            x_BTD.flatten(0, 1), delta_ND, weight_D, block.attention_eps, block.qkv.operand_dtype
        )
        heads_BHTE = block.qkv.forward(normed).view(batch, length, -1, block.head_size).transpose(1, 2)
        queries, keys = (rows // block.head_size for rows in block.qkv.rows[:2])
        kernels.rotate_heads(heads_BHTE[:, : queries + keys], *rope)
        saved = (normed.values,) if block.saves_gemm_inputs and normed.scale is None else ()
        ctx.save_for_backward(total_ND, rstd_N, weight_D, *rope, *saved)
        ctx.block, ctx.added = block, delta_BTD is not None
        total_BTD = x_BTD if delta_BTD is None else total_ND.view(batch, length, width)
        return total_BTD, *heads_BHTE.split((queries, keys, keys), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor, *head_grads: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, rstd_N, weight_D, cos_TE, sin_TE, *saved = ctx.saved_tensors
        gemms = ctx.block.qkv
        q, k, v = head_grads
        grad_NW = kernels.rope_backward(q, k, v, cos_TE, sin_TE)
        grads = kernels.rms_norm_backward(
            gemms.input_grad(grad_NW),
            total_ND,
            rstd_N,
            weight_D,
            grad_BTD.flatten(0, 1),
            normed=not saved,
        )
        (normed_ND,) = saved or (grads.normed_ND,)
        weight_grads = gemms.weight_grads(grad_NW, normed_ND)
        delta_BTD = grads.delta_ND.view_as(grad_BTD) if ctx.added else None
        return grads.residual_ND.view_as(grad_BTD), delta_BTD, grads.weight_D, None, None, *weight_grads


class _Linear(torch.autograd.Function):
    """A linear with nothing fused to it."""

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
    """Residual add, norm, the merged gate and up GEMM, SwiGLU, and the down GEMM."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, delta_BTD: Tensor, weight_D: Tensor, block: TritonBlock, *masters: Tensor
    ) -> tuple[Tensor, Tensor]:
        total_ND, normed, rstd_N = kernels.add_rms_norm(
            x_BTD.flatten(0, 1), delta_BTD.flatten(0, 1), weight_D, block.ffn_eps, block.gate_up.operand_dtype
        )
        gate_up_NG = block.gate_up.forward(normed)
        inner = kernels.swiglu(gate_up_NG, block.down.operand_dtype)
        saved = (
            (normed.values, inner.values)
            if block.saves_gemm_inputs and normed.scale is inner.scale is None
            else ()
        )
        ctx.save_for_backward(total_ND, rstd_N, weight_D, gate_up_NG, *saved)
        del normed
        out_ND = block.down.forward(inner)
        ctx.block = block
        return total_ND.view_as(x_BTD), out_ND.view_as(delta_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor, grad_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, rstd_N, weight_D, gate_up_NG, *saved = ctx.saved_tensors
        block, grad_out_ND = ctx.block, grad_out_BTD.flatten(0, 1)
        grad_NF = block.down.input_grad(grad_out_ND)
        inner_NF: Tensor | None
        grad_amax_G = inner_amax_F = None
        linears = (block.gate_up, block.down)
        if all(linear.uses_fp8_weight_grad_for(len(gate_up_NG)) for linear in linears):
            grad_NG, inner_NF, grad_amax_G, inner_amax_F = kernels.swiglu_backward_amax(gate_up_NG, grad_NF)
        else:
            grad_NG, inner_NF = kernels.swiglu_backward(gate_up_NG, grad_NF, inner=not saved)
        del grad_NF
        if saved:
            normed_ND, inner_NF = saved
        down = block.down.weight_grads(grad_out_ND, inner_NF, x_amax_I=inner_amax_F)
        del inner_NF
        grads = kernels.rms_norm_backward(
            block.gate_up.input_grad(grad_NG),
            total_ND,
            rstd_N,
            weight_D,
            grad_BTD.flatten(0, 1),
            normed=not saved,
        )
        normed_ND = normed_ND if saved else grads.normed_ND
        gate_up = block.gate_up.weight_grads(grad_NG, normed_ND, grad_amax_O=grad_amax_G)
        grad_residual, grad_delta = grads.residual_ND.view_as(grad_BTD), grads.delta_ND.view_as(grad_BTD)
        return grad_residual, grad_delta, grads.weight_D, None, *gate_up, *down


class _FinalNorm(torch.autograd.Function):
    """Residual add and norm; without a delta, the norm alone."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, delta_BTD: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        delta_ND = None if delta_BTD is None else delta_BTD.flatten(0, 1)
        total_ND, normed, rstd_N = kernels.add_rms_norm(x_BTD.flatten(0, 1), delta_ND, weight_D, eps, dtype)
        ctx.save_for_backward(total_ND, rstd_N, weight_D)
        ctx.added = delta_BTD is not None
        return normed.values.view_as(x_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        total_ND, rstd_N, weight_D = ctx.saved_tensors
        grads = kernels.rms_norm_backward(
            grad_BTD.flatten(0, 1), total_ND, rstd_N, weight_D, None, normed=False
        )
        grad_delta_BTD = grads.delta_ND.view_as(grad_BTD) if ctx.added else None
        return grads.residual_ND.view_as(grad_BTD), grad_delta_BTD, grads.weight_D, None, None


class TritonEmbedding(nn.Embedding):
    """An embedding by Triton kernels."""

    def __init__(self, embedding: nn.Embedding, residual_dtype: torch.dtype) -> None:
        """Take over an embedding's weight.

        Args:
            embedding: The one that this replaces.
            residual_dtype: Dtype of the output.
        """
        rows, width = embedding.weight.shape
        super().__init__(rows, width, _weight=torch.empty(rows, width, device="meta"))
        self.weight = embedding.weight
        self.residual_dtype = residual_dtype

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream of the first block."""
        x_BTD: Tensor = _Embedding.apply(tokens_BT, self.weight, self.residual_dtype)
        return x_BTD


class TritonRMSNorm(RMSNorm):
    """The final norm, fused with the last residual add."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        """Take over a norm's weight.

        Args:
            norm: The one that this replaces.
            dtype: Dtype of the output, which the head reads.
        """
        super().__init__(0, norm.eps)
        self.weight, self.dtype = norm.weight, dtype

    def forward(self, x: Residual) -> Tensor:
        """Add and normalise."""
        x_BTD, delta_BTD = x if isinstance(x, tuple) else (x, None)
        normed_BTD: Tensor = _FinalNorm.apply(x_BTD, delta_BTD, self.weight, self.eps, self.dtype)
        return normed_BTD


class TritonBlock(Block):
    """A block by Triton kernels; it takes over the modules of a :class:`Block`, so parameter names stay."""

    def __init__(self, block: Block, grad_dtype: torch.dtype, gemms: Gemms = TORCH_GEMMS) -> None:
        """Replace a block whose linears have bf16 weight copies.

        Args:
            block: With RMS norms, RoPE and SwiGLU, and without biases.
            grad_dtype: Gradient dtype of its weight gradients.
            gemms: Compute its 16-bit GEMMs.
        """
        nn.Module.__init__(self)
        self.attention_norm, self.attention = block.attention_norm, block.attention
        self.ffn_norm, self.ffn = block.ffn_norm, block.ffn
        self.checkpointing, self.is_moe = block.checkpointing, block.is_moe
        attention, ffn = self.attention, self.ffn
        assert isinstance(ffn, GatedFeedForward), "spec.execution.uses_triton_blocks requires SwiGLU"
        self.attention_eps, self.ffn_eps = block.attention_norm.eps, block.ffn_norm.eps
        self.head_size = attention.head_size
        self.saves_gemm_inputs = block.checkpointing.mode == "none"
        """Whether GEMM inputs are saved, too. Not FP8 inputs: the weight-gradient GEMMs cannot read them."""
        projections = (attention.wq, attention.wk, attention.wv)
        self.qkv = _build_gemms(attention.qkv, projections, grad_dtype, gemms)
        self.wo = _build_gemms(attention.wo, (attention.wo,), grad_dtype, gemms)
        self.gate_up = _build_gemms(ffn.gate_up, (ffn.gate, ffn.up), grad_dtype, gemms)
        self.down = _build_gemms(ffn.down, (ffn.down,), grad_dtype, gemms)

    def forward(
        self,
        x: Residual,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        weights_B2: Tensor | None = None,
    ) -> Residual:
        """The residual stream after this block, as a pair; with full checkpointing as one tensor.

        Args:
            x: The residual stream.
            rope: Cosine and sine of the positions.
            mask: Added to attention scores.
            weights_B2: For experts; not read.
        """
        assert rope is not None, "spec.execution.uses_triton_blocks requires RoPE"
        x_BTD, delta_BTD = x if isinstance(x, tuple) else (x, None)
        if self.checkpointing.mode != "full" or not torch.is_grad_enabled():
            return self._compute_pair(x_BTD, delta_BTD, rope, mask)
        x_BTD, delta_BTD = checkpoint(
            self._compute_pair,
            x_BTD,
            delta_BTD,
            rope,
            mask,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return x_BTD + delta_BTD  # the one tensor that the next block saves

    def _compute_pair(
        self, x_BTD: Tensor, delta_BTD: Tensor | None, rope: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream before the feed-forward, and the feed-forward's output."""
        attention, ffn = self.attention, self.ffn
        assert isinstance(ffn, GatedFeedForward), "checked when it was built"
        masters = [linear.weight for linear in (attention.wq, attention.wk, attention.wv)]
        x_BTD, q, k, v = _NormQkvRope.apply(
            x_BTD, delta_BTD, self.attention_norm.weight, rope, self, *masters
        )
        out_BTW = attention.context.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        delta_BTD = _Linear.apply(out_BTW, self.wo, attention.wo.weight)
        masters = [linear.weight for linear in (ffn.gate, ffn.up, ffn.down)]
        x_BTD, delta_BTD = _FeedForward.apply(x_BTD, delta_BTD, self.ffn_norm.weight, self, *masters)
        return x_BTD, delta_BTD


def _build_gemms(
    merged: MergedLinear | Linear | None, linears: Sequence[Linear], grad_dtype: torch.dtype, gemms: Gemms
) -> LinearGemms:
    assert merged is not None, "linears that share an input are merged"
    assert merged.weight_copy is not None, "it has a bf16 weight copy"
    for linear in linears:
        linear.weight.grad_dtype = grad_dtype  # else autograd casts to the master's dtype
    rows = tuple(linear.out_features for linear in linears)
    return LinearGemms(
        merged.weight_copy, merged.uses_fp8, merged.uses_fp8_weight_grad, rows, grad_dtype, gemms
    )
