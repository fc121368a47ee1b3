"""What a Llama-shaped block does between its matrix products, one pass over memory for each step.

A compiler fuses what it is shown, but not across what it cannot look into: it reads the residual stream once
to add and once more to normalise, computes both halves of a gradient for each half that it writes, and makes
again in a pass of its own what another pass has in its registers. Here every value crosses memory once.
These functions know nothing of gradients; ``run.models.fused`` puts them together.

On GPUs they are Triton's (``triton_kernels``). Elsewhere torch's operations compute the same: what the
kernels are compared with.

Shape suffixes: N tokens, D hidden, W columns of several heads, B batch, T tokens of a sequence, H query
heads, K key heads, E head size, F feed-forward, G = 2 F, C tokens of a chunk, V words.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.models.attention import apply_rope
from meshwright.models.kernels import fp8


class GemmOperand(NamedTuple):
    """What a product reads along its rows."""

    values: Tensor
    scale: Tensor | None = None
    """Of each row, (N, 1), where the values are of 8 bits."""


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel works on it."""
    return x.is_cuda


def _triton() -> ModuleType:
    """Triton is a part of torch for GPUs, and of no other."""
    from meshwright.models.kernels import triton_block as triton_kernels  # noqa: PLC0415

    return triton_kernels


def _triton_loss() -> ModuleType:
    from meshwright.models.kernels import triton_loss  # noqa: PLC0415

    return triton_loss


def _scales(x: Tensor) -> Tensor:
    return torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def embedding_lookup(table_VD: Tensor, tokens_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of an embedding, in the precision of the stream; on GPUs a word that it has not is no number."""
    if not on_gpu(table_VD):
        return table_VD[tokens_N].to(dtype)
    out_ND = torch.empty(len(tokens_N), table_VD.shape[1], dtype=dtype, device=table_VD.device)
    _triton().embedding_lookup(table_VD, tokens_N.contiguous(), out_ND)
    return out_ND


def embedding_grad(grad_ND: Tensor, tokens_N: Tensor, vocab_size: int) -> Tensor:
    """Gradient of an embedding, float32: of each word the sum over its tokens, in any order.

    Torch sorts the tokens first and sums in the same order every time, which a deterministic run wants.
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
    """Add to the residual stream and normalise it: the new stream, what the product reads, inverse norms.

    Args:
        x_ND: The stream.
        delta_ND: What is added; None for nothing, and the stream is returned as it is.
        weight_D: Of the norm.
        eps: Of the norm.
        dtype: Of what the product reads.
    """
    if on_gpu(x_ND):
        total_ND = x_ND if delta_ND is None else torch.empty_like(x_ND)
        normal = GemmOperand(
            torch.empty(x_ND.shape, dtype=dtype, device=x_ND.device),
            _scales(x_ND) if dtype == fp8.E4M3 else None,
        )
        inverse_N = torch.empty(x_ND.shape[0], dtype=torch.float32, device=x_ND.device)
        _triton().add_rms_norm(x_ND, delta_ND, weight_D, total_ND, *normal, inverse_N, eps)
        return total_ND, normal, inverse_N
    total_ND = x_ND if delta_ND is None else (x_ND.float() + delta_ND.float()).to(x_ND.dtype)
    exact_ND = total_ND.float()
    inverse_N = (exact_ND.square().mean(-1) + eps).rsqrt()
    exact_ND = exact_ND * inverse_N.unsqueeze(1) * weight_D.float()
    normal = GemmOperand(*fp8.cast_rows(exact_ND)) if dtype == fp8.E4M3 else GemmOperand(exact_ND.to(dtype))
    return total_ND, normal, inverse_N


class NormGrads(NamedTuple):
    """What comes back through a norm."""

    residual_ND: Tensor
    delta_ND: Tensor
    """The same in the precision of products."""
    weight_D: Tensor
    normal_ND: Tensor | None
    """The norm's output, made again."""


def rms_norm_backward(
    grad_ND: Tensor,
    total_ND: Tensor,
    inverse_N: Tensor,
    weight_D: Tensor,
    beside_ND: Tensor | None,
    normal: bool = True,
) -> NormGrads:
    """Gradients of a norm's input and weight, with what comes to the input beside the norm.

    Args:
        grad_ND: Of the norm's output, in the precision of products.
        total_ND: Its input.
        inverse_N: As :func:`add_rms_norm` gave it.
        weight_D: Of the norm.
        beside_ND: A further gradient of its input.
        normal: Whether the norm's output is wanted again.
    """
    if on_gpu(grad_ND):
        out_ND = torch.empty_like(total_ND)
        low_ND = out_ND if out_ND.dtype == grad_ND.dtype else torch.empty_like(grad_ND)
        normal_ND = torch.empty_like(grad_ND) if normal else None
        weight_grad_D = _triton().rms_norm_backward(
            grad_ND,
            total_ND,
            inverse_N,
            weight_D,
            beside_ND,
            out_ND,
            None if low_ND is out_ND else low_ND,
            normal_ND,
        )
        return NormGrads(out_ND, low_ND, weight_grad_D, normal_ND)
    exact_ND, inverse_N1 = grad_ND.float(), inverse_N.unsqueeze(1)
    unit_ND, weighed_ND = total_ND.float() * inverse_N1, exact_ND * weight_D.float()
    out_ND = (weighed_ND - unit_ND * (weighed_ND * unit_ND).mean(-1, keepdim=True)) * inverse_N1
    if beside_ND is not None:
        out_ND = out_ND + beside_ND.float()
    return NormGrads(
        out_ND.to(total_ND.dtype),
        out_ND.to(grad_ND.dtype),
        (exact_ND * unit_ND).sum(0),
        (unit_ND * weight_D.float()).to(grad_ND.dtype) if normal else None,
    )


def rotate_heads(heads_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> None:
    """Turn each pair (i, i + E/2) of each head by its position's angle, in place.

    Args:
        heads_BHTE: A view of some heads of rows that hold more.
        cos_TE: Of every position and pair.
        sin_TE: Likewise.
    """
    if on_gpu(heads_BHTE):
        batch, heads, length, size = heads_BHTE.shape
        rows_NW = heads_BHTE.as_strided((batch * length, heads * size), (heads_BHTE.stride(2), 1))
        _triton().rotate(heads_BHTE, rows_NW, 0, cos_TE, sin_TE, 1)
    else:
        heads_BHTE.copy_(apply_rope(heads_BHTE, cos_TE, sin_TE))


def rope_backward(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Gradients of queries and keys before they were turned, and of values, beside each other: (N, W)."""
    batch, _, length, size = q_BHTE.shape
    parts = ((q_BHTE, -1), (k_BKTE, -1), (v_BKTE, 0))
    out_NW = q_BHTE.new_empty(batch * length, sum(part.shape[1] for part, _ in parts) * size)
    column = 0
    for part_BHTE, sign in parts:
        width = part_BHTE.shape[1] * size
        if on_gpu(out_NW):
            # Some of attention's kernels give the gradient of keys with its last two dims changed over.
            lying = part_BHTE if part_BHTE.stride(-1) == 1 else part_BHTE.contiguous()
            _triton().rotate(lying, out_NW, column, cos_TE, sin_TE, sign)
        else:
            rotated = apply_rope(part_BHTE, cos_TE, sin_TE * sign) if sign else part_BHTE
            out_NW[:, column : column + width] = rotated.transpose(1, 2).reshape(-1, width)
        column += width
    return out_NW


def swiglu(both_NG: Tensor, dtype: torch.dtype) -> GemmOperand:
    """``silu(gate) * up`` of the two beside each other, in the precision that the product reads."""
    rows, width = both_NG.shape[0], both_NG.shape[1] // 2
    if not on_gpu(both_NG):
        gate_NF, up_NF = both_NG.float().chunk(2, dim=-1)
        inner_NF = gate_NF * torch.sigmoid(gate_NF) * up_NF
        return GemmOperand(*fp8.cast_rows(inner_NF)) if dtype == fp8.E4M3 else GemmOperand(inner_NF.to(dtype))
    out_NF = torch.empty(rows, width, dtype=dtype, device=both_NG.device)
    if dtype == fp8.E4M3:
        scale_N1 = _scales(out_NF)
        _triton().swiglu_cast(both_NG, out_NF, scale_N1)
        return GemmOperand(out_NF, scale_N1)
    _triton().swiglu(both_NG, out_NF)
    return GemmOperand(out_NF)


def swiglu_backward(both_NG: Tensor, grad_NF: Tensor, inner: bool = True) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and up beside each other; where ``inner``, what came out of :func:`swiglu`, too."""
    if not on_gpu(both_NG):
        gate_NF, up_NF = both_NG.float().chunk(2, dim=-1)
        exact_NF, share_NF = grad_NF.float(), torch.sigmoid(gate_NF)
        swish_NF = gate_NF * share_NF
        to_gate_NF = exact_NF * up_NF * (share_NF + swish_NF * (1 - share_NF))
        out_NG = torch.cat((to_gate_NF, exact_NF * swish_NF), dim=-1)
        return out_NG.to(both_NG.dtype), (swish_NF * up_NF).to(both_NG.dtype) if inner else None
    out_NG, inner_NF = torch.empty_like(both_NG), torch.empty_like(grad_NF) if inner else None
    _triton().swiglu_backward(both_NG, grad_NF, out_NG, inner_NF)
    return out_NG, inner_NF


def swiglu_backward_amax(both_NG: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and the largest of each column of both."""
    if not on_gpu(both_NG):
        out_NG, inner_NF = swiglu_backward(both_NG, grad_NF)
        assert inner_NF is not None, "it was wanted"
        return out_NG, inner_NF, column_amax(out_NG), column_amax(inner_NF)
    out_NG, inner_NF = torch.empty_like(both_NG), torch.empty_like(grad_NF)
    widths = (both_NG.shape[1], grad_NF.shape[1])
    amax = torch.zeros(sum(widths), dtype=torch.float32, device=both_NG.device)
    amax_G, amax_F = amax.split(widths)
    _triton().swiglu_backward_amax(both_NG, grad_NF, out_NG, inner_NF, amax_G, amax_F)
    return out_NG, inner_NF, amax_G, amax_F


def cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, factor: float, ignored: int, gradient: bool
) -> Tensor:
    """Losses of tokens, float32; on GPUs.

    Args:
        logits_CV: Where it is wanted, the gradient of the losses' sum takes their place.
        targets_C: Words.
        factor: What the gradient is multiplied by.
        ignored: A target without loss.
        gradient: Whether it is wanted.
    """
    losses_C = torch.empty(len(targets_C), dtype=torch.float32, device=logits_CV.device)
    _triton_loss().cross_entropy(logits_CV, targets_C, losses_C, factor, ignored, gradient)
    return losses_C


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply in place by a number on the device; where that is 1, a GPU does not pass over the values."""
    if on_gpu(x):
        _triton_loss().scale(x, factor)
    else:
        x.mul_(factor)


def cast_rows(x: Tensor, by: Tensor | None = None) -> GemmOperand:
    """Values in 8 bits and the scale of each row; of the values times one factor a column, where given."""
    if not on_gpu(x):
        return GemmOperand(*fp8.cast_rows(x if by is None else x.float() * by.view(1, -1)))
    cast, scale = torch.empty(x.shape, dtype=fp8.E4M3, device=x.device), _scales(x)
    _triton().cast_rows(x, by, cast, scale)
    return GemmOperand(cast, scale)


def column_amax(x: Tensor) -> Tensor:
    """The largest of each column, float32."""
    if not on_gpu(x):
        return x.abs().amax(0).float()
    amax = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device)
    _triton().column_amax(x, amax)
    return amax


def cast_columns(x: Tensor, amax: Tensor | None = None) -> GemmOperand:
    """Values in 8 bits by columns, and transposed: each column becomes a row with its scale.

    Args:
        x: The values.
        amax: The largest of each column, where it is known.
    """
    if not on_gpu(x):
        return GemmOperand(*fp8.cast_columns(x, amax))
    amax = column_amax(x) if amax is None else amax
    cast = torch.empty(x.shape[1], x.shape[0], dtype=fp8.E4M3, device=x.device)
    scales = _scales(cast)
    _triton().cast_columns(x, amax, cast, scales)
    return GemmOperand(cast, scales)


def cast_transposed(x: Tensor, scale: Tensor) -> Tensor:
    """What :func:`cast_rows` made of the same values with this scale, transposed."""
    if not on_gpu(x):
        return fp8.cast(x, scale).t().contiguous()
    out = torch.empty(x.shape[1], x.shape[0], dtype=fp8.E4M3, device=x.device)
    _triton().cast_transposed(x, scale, out)
    return out
