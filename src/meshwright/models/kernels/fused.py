"""Fused operations of a Llama-shaped block between its GEMMs: each is one pass over memory.

torch.compile fuses what it sees, but not across opaque operations. It reads the residual stream once to add
and again to normalise, computes both halves of a gradient for each half that it writes, and recomputes in an
extra pass what another pass has in registers. Here every value crosses memory once. These functions have no
autograd; ``models.triton_block`` composes them.

GPUs run Triton kernels (``triton_block``, ``triton_loss``). Elsewhere torch operations compute the same; the
tests compare the kernels with them.

Shape suffixes: N tokens, D hidden, W columns of several heads, B batch, T tokens of a sequence, H query
heads, K key heads, E head size, F feed-forward, G = 2 F, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.models.kernels import fp8
from meshwright.models.kernels.fp8 import GemmOperand
from meshwright.models.rope import apply_rope


def on_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels run on a tensor."""
    return x.is_cuda


def _triton() -> ModuleType:
    """Imported late: only torch builds for GPUs include Triton."""
    from meshwright.models.kernels import triton_block  # noqa: PLC0415

    return triton_block


def _triton_loss() -> ModuleType:
    from meshwright.models.kernels import triton_loss  # noqa: PLC0415

    return triton_loss


def _scales(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def embedding_lookup(table_VD: Tensor, tokens_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding table, in the residual dtype; on GPUs a token outside the table gives NaN."""
    if not on_gpu(table_VD):
        return table_VD[tokens_N].to(dtype)
    out_ND = torch.empty(len(tokens_N), table_VD.shape[1], dtype=dtype, device=table_VD.device)
    _triton().embedding_lookup(table_VD, tokens_N.contiguous(), out_ND)
    return out_ND


def embedding_grad(grad_ND: Tensor, tokens_N: Tensor, vocab_size: int) -> Tensor:
    """Gradient of an embedding table, float32: per row the sum over its tokens, in any order.

    Deterministic runs use torch's, which sorts the tokens and sums in a fixed order.
    """
    if not on_gpu(grad_ND) or torch.are_deterministic_algorithms_enabled():
        found: Tensor = torch.ops.aten.embedding_dense_backward(
            grad_ND.float(), tokens_N, vocab_size, -1, False
        )
        return found
    table_VD = torch.zeros(vocab_size, grad_ND.shape[1], dtype=torch.float32, device=grad_ND.device)
    _triton().embedding_grad(grad_ND.contiguous(), tokens_N.contiguous(), table_VD)
    return table_VD


def add_rms_norm(
    x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, GemmOperand, Tensor]:
    """Residual add and RMS norm: the new residual stream, the norm's output, and inverse RMS values.

    Args:
        x_ND: The residual stream.
        delta_ND: Added to it; None adds nothing and returns the stream unchanged.
        weight_D: Weight of the norm.
        eps: Epsilon of the norm.
        dtype: Dtype of the norm's output, which the next GEMM reads.
    """
    if on_gpu(x_ND):
        total_ND = x_ND if delta_ND is None else torch.empty_like(x_ND)
        normed = GemmOperand(
            torch.empty(x_ND.shape, dtype=dtype, device=x_ND.device),
            _scales(x_ND) if dtype == fp8.E4M3 else None,
        )
        rstd_N = torch.empty(x_ND.shape[0], dtype=torch.float32, device=x_ND.device)
        _triton().add_rms_norm(x_ND, delta_ND, weight_D, total_ND, *normed, rstd_N, eps)
        return total_ND, normed, rstd_N
    total_ND = x_ND if delta_ND is None else (x_ND.float() + delta_ND.float()).to(x_ND.dtype)
    exact_ND = total_ND.float()
    rstd_N = (exact_ND.square().mean(-1) + eps).rsqrt()
    exact_ND = exact_ND * rstd_N.unsqueeze(1) * weight_D.float()
    normed = fp8.cast_rows(exact_ND) if dtype == fp8.E4M3 else GemmOperand(exact_ND.to(dtype))
    return total_ND, normed, rstd_N


class NormGrads(NamedTuple):
    """Gradients of a residual add and norm."""

    residual_ND: Tensor
    delta_ND: Tensor
    """The same in the compute dtype."""
    weight_D: Tensor
    normed_ND: Tensor | None
    """The norm's output, recomputed."""


def rms_norm_backward(
    grad_ND: Tensor,
    total_ND: Tensor,
    rstd_N: Tensor,
    weight_D: Tensor,
    residual_grad_ND: Tensor | None,
    normed: bool = True,
) -> NormGrads:
    """Gradients of a norm's input and weight; the residual branch's gradient is added to the input's.

    Args:
        grad_ND: Gradient of the norm's output, in the compute dtype.
        total_ND: Its input.
        rstd_N: From :func:`add_rms_norm`.
        weight_D: Weight of the norm.
        residual_grad_ND: Gradient of its input through the residual branch.
        normed: Whether to recompute the norm's output.
    """
    if on_gpu(grad_ND):
        out_ND = torch.empty_like(total_ND)
        low_ND = out_ND if out_ND.dtype == grad_ND.dtype else torch.empty_like(grad_ND)
        normed_ND = torch.empty_like(grad_ND) if normed else None
        weight_grad_D = _triton().rms_norm_backward(
            grad_ND,
            total_ND,
            rstd_N,
            weight_D,
            residual_grad_ND,
            out_ND,
            None if low_ND is out_ND else low_ND,
            normed_ND,
        )
        return NormGrads(out_ND, low_ND, weight_grad_D, normed_ND)
    exact_ND, inverse_N1 = grad_ND.float(), rstd_N.unsqueeze(1)
    unit_ND, weighed_ND = total_ND.float() * inverse_N1, exact_ND * weight_D.float()
    out_ND = (weighed_ND - unit_ND * (weighed_ND * unit_ND).mean(-1, keepdim=True)) * inverse_N1
    if residual_grad_ND is not None:
        out_ND = out_ND + residual_grad_ND.float()
    return NormGrads(
        out_ND.to(total_ND.dtype),
        out_ND.to(grad_ND.dtype),
        (exact_ND * unit_ND).sum(0),
        (unit_ND * weight_D.float()).to(grad_ND.dtype) if normed else None,
    )


def rotate_heads(heads_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> None:
    """RoPE in place.

    Args:
        heads_BHTE: A view of some of the heads of each row.
        cos_TE: From ``build_rope``.
        sin_TE: Likewise.
    """
    if on_gpu(heads_BHTE):
        batch, heads, length, size = heads_BHTE.shape
        rows_NW = heads_BHTE.as_strided((batch * length, heads * size), (heads_BHTE.stride(2), 1))
        _triton().rotate(heads_BHTE, rows_NW, 0, cos_TE, sin_TE, 1)
    else:
        heads_BHTE.copy_(apply_rope(heads_BHTE, cos_TE, sin_TE))


def rope_backward(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Gradients of the queries and keys before RoPE, and of the values, concatenated: (N, W)."""
    batch, _, length, size = q_BHTE.shape
    parts = ((q_BHTE, -1), (k_BKTE, -1), (v_BKTE, 0))
    out_NW = q_BHTE.new_empty(batch * length, sum(part.shape[1] for part, _ in parts) * size)
    column = 0
    for part_BHTE, sign in parts:
        width = part_BHTE.shape[1] * size
        if on_gpu(out_NW):
            # Some attention kernels return the key gradient with its last two dims transposed.
            dense_BHTE = part_BHTE if part_BHTE.stride(-1) == 1 else part_BHTE.contiguous()
            _triton().rotate(dense_BHTE, out_NW, column, cos_TE, sin_TE, sign)
        else:
            rotated = apply_rope(part_BHTE, cos_TE, sin_TE * sign) if sign else part_BHTE
            out_NW[:, column : column + width] = rotated.transpose(1, 2).reshape(-1, width)
        column += width
    return out_NW


def swiglu(gate_up_NG: Tensor, dtype: torch.dtype) -> GemmOperand:
    """SwiGLU, ``silu(gate) * up``, of concatenated gate and up, in the dtype that the next GEMM reads."""
    rows, width = gate_up_NG.shape[0], gate_up_NG.shape[1] // 2
    if not on_gpu(gate_up_NG):
        gate_NF, up_NF = gate_up_NG.float().chunk(2, dim=-1)
        inner_NF = gate_NF * torch.sigmoid(gate_NF) * up_NF
        return fp8.cast_rows(inner_NF) if dtype == fp8.E4M3 else GemmOperand(inner_NF.to(dtype))
    out_NF = torch.empty(rows, width, dtype=dtype, device=gate_up_NG.device)
    if dtype == fp8.E4M3:
        scale_N1 = _scales(out_NF)
        _triton().swiglu_cast(gate_up_NG, out_NF, scale_N1)
        return GemmOperand(out_NF, scale_N1)
    _triton().swiglu(gate_up_NG, out_NF)
    return GemmOperand(out_NF)


def swiglu_backward(gate_up_NG: Tensor, grad_NF: Tensor, inner: bool = True) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and up, concatenated; with ``inner`` also the recomputed output of :func:`swiglu`."""
    if not on_gpu(gate_up_NG):
        gate_NF, up_NF = gate_up_NG.float().chunk(2, dim=-1)
        exact_NF, share_NF = grad_NF.float(), torch.sigmoid(gate_NF)
        swish_NF = gate_NF * share_NF
        to_gate_NF = exact_NF * up_NF * (share_NF + swish_NF * (1 - share_NF))
        out_NG = torch.cat((to_gate_NF, exact_NF * swish_NF), dim=-1)
        return out_NG.to(gate_up_NG.dtype), (swish_NF * up_NF).to(gate_up_NG.dtype) if inner else None
    out_NG, inner_NF = torch.empty_like(gate_up_NG), torch.empty_like(grad_NF) if inner else None
    _triton().swiglu_backward(gate_up_NG, grad_NF, out_NG, inner_NF)
    return out_NG, inner_NF


def swiglu_backward_amax(gate_up_NG: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the largest magnitude of each column of both."""
    if not on_gpu(gate_up_NG):
        out_NG, inner_NF = swiglu_backward(gate_up_NG, grad_NF)
        assert inner_NF is not None, "inner is true by default"
        return out_NG, inner_NF, column_amax(out_NG), column_amax(inner_NF)
    out_NG, inner_NF = torch.empty_like(gate_up_NG), torch.empty_like(grad_NF)
    widths = (gate_up_NG.shape[1], grad_NF.shape[1])
    amax = torch.zeros(sum(widths), dtype=torch.float32, device=gate_up_NG.device)
    amax_G, amax_F = amax.split(widths)
    _triton().swiglu_backward_amax(gate_up_NG, grad_NF, out_NG, inner_NF, amax_G, amax_F)
    return out_NG, inner_NF, amax_G, amax_F


def cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, factor: float, ignored: int, gradient: bool
) -> Tensor:
    """Cross-entropy of each token, float32; on GPUs only.

    Args:
        logits_CV: Overwritten with the gradient of the summed loss if ``gradient``.
        targets_C: Token ids.
        factor: Multiplies the gradient.
        ignored: A target without loss.
        gradient: Whether to compute the gradient.
    """
    losses_C = torch.empty(len(targets_C), dtype=torch.float32, device=logits_CV.device)
    _triton_loss().cross_entropy(logits_CV, targets_C, losses_C, factor, ignored, gradient)
    return losses_C


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a scalar on the device; a GPU skips the pass if the scalar is 1."""
    if on_gpu(x):
        _triton_loss().scale(x, factor)
    else:
        x.mul_(factor)


def cast_rows(x: Tensor, by: Tensor | None = None) -> GemmOperand:
    """As :func:`fp8.cast_rows`."""
    if not on_gpu(x):
        return fp8.cast_rows(x, by)
    cast, scale = torch.empty(x.shape, dtype=fp8.E4M3, device=x.device), _scales(x)
    _triton().cast_rows(x, by, cast, scale)
    return GemmOperand(cast, scale)


def column_amax(x: Tensor) -> Tensor:
    """Largest magnitude of each column, float32."""
    if not on_gpu(x):
        return x.abs().amax(0).float()
    amax = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    _triton().column_amax(x, amax)
    return amax


def cast_columns(x: Tensor, amax: Tensor | None = None) -> GemmOperand:
    """As :func:`fp8.cast_columns`."""
    if not on_gpu(x):
        return fp8.cast_columns(x, amax)
    amax = column_amax(x) if amax is None else amax
    cast = torch.empty(x.shape[1], x.shape[0], dtype=fp8.E4M3, device=x.device)
    scales = _scales(cast)
    _triton().cast_columns(x, amax, cast, scales)
    return GemmOperand(cast, scales)


def cast_transposed(x: Tensor, scale: Tensor) -> Tensor:
    """The values that :func:`cast_rows` gives for these scales, transposed."""
    if not on_gpu(x):
        return fp8.cast(x, scale).t().contiguous()
    out = torch.empty(x.shape[1], x.shape[0], dtype=fp8.E4M3, device=x.device)
    _triton().cast_transposed(x, scale, out)
    return out
