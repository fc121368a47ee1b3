"""Triton kernels of :mod:`meshwright.models.kernels.fused`; imported only on GPUs.

All are memory-bound: each program reads a row or a tile once, computes in float32 and writes the result. The
number of warps per row follows from its width. The shapes of ``benchmarks/one_device.py`` reach 3 to 4.2 TB/s
on an H200, whose copies reach 4.3.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.models.kernels import fp8

E4M3_MAX, MIN_AMAX = tl.constexpr(fp8.E4M3_MAX), tl.constexpr(fp8.MIN_AMAX)
WARP_ELEMENTS = 256
"""Elements of a row per warp."""
THREADS = 1024
"""Threads per multiprocessor of persistent programs, which loop over rows."""
AHEAD_BLOCK = 4096
"""For rows of this block size a norm's backward pass prefetches the next row, with half the warps: 126 us
instead of 146 with 3072 columns on an H200, but 167 instead of 161 with 2048. Two wider rows would not fit
into registers."""
SWIGLU_BLOCK, SWIGLU_BACKWARD_BLOCK = 2048, 8192
AMAX_ROWS, AMAX_COLUMNS, AMAX_STEPS = 32, 128, 16
"""Column amax: rows and columns of a tile, and tiles per program, below each other."""
WIDE_ROWS, WIDE_COLUMNS, WIDE_STEPS = 4, 512, 32
"""The same for a kernel that writes as well."""
TILE_ROWS, TILE_COLUMNS = 64, 128
"""Tile of a transposed matrix."""


def _warps(block: int, most: int = 16) -> int:
    return max(1, min(most, block // WARP_ELEMENTS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _clamp(x):
    """Clamp to the range of e4m3; NaN stays NaN."""
    x = tl.maximum(x, -E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_row(values, row, cast_ptr, scale_ptr, at, mask):
    """Cast a whole row, and store its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0), MIN_AMAX) / E4M3_MAX
    tl.store(scale_ptr + row, scale)
    tl.store(cast_ptr + at, _clamp(values / scale).to(cast_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_gate_up(gate_up_ptr, at, width, mask):
    """Gate and up, which are concatenated."""
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return gate, tl.load(gate_up_ptr + at + width, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _swiglu_gradients(gate, up, grad):
    """The SwiGLU output, and the gradients of gate and up."""
    share = tl.sigmoid(gate)
    swish = gate * share
    return swish * up, grad * up * (share + swish * (1 - share)), grad * swish


@triton.jit
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    scale_ptr,
    rstd_ptr,
    width,
    eps,
    ADD: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    at = row * width + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    normed = x * rstd * weight
    if CAST:
        _store_row(normed, row, normed_ptr, scale_ptr, at, mask)
    else:
        tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    total: Tensor,
    normed: Tensor,
    scale: Tensor | None,
    rstd: Tensor,
    eps: float,
) -> None:
    """See ``fused.add_rms_norm``."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _add_rms_norm[(rows,)](
        x,
        delta,
        weight,
        total,
        normed,
        scale,
        rstd,
        width,
        eps,
        ADD=delta is not None,
        CAST=scale is not None,
        BLOCK=block,
        num_warps=_warps(block, most=8),
    )


@triton.jit
def _load_row(
    grad_ptr, total_ptr, residual_grad_ptr, rstd_ptr, row, rows, at, mask, ADD_RESIDUAL: tl.constexpr
):
    """Load a row for a norm's backward pass; zeros behind the last one."""
    mask = mask & (row < rows)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    x = tl.load(total_ptr + at, mask=mask, other=0.0)
    residual_grad = tl.load(residual_grad_ptr + at, mask=mask, other=0.0) if ADD_RESIDUAL else x
    return grad, x, residual_grad, tl.load(rstd_ptr + row, mask=row < rows, other=0.0)


@triton.jit
def _rms_norm_backward(
    grad_ptr,
    total_ptr,
    rstd_ptr,
    weight_ptr,
    residual_grad_ptr,
    out_ptr,
    low_ptr,
    normed_ptr,
    parts_ptr,
    rows,
    width,
    ADD_RESIDUAL: tl.constexpr,
    LOW: tl.constexpr,
    NORMED: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    at = program.to(tl.int64) * width + columns
    apart = programs.to(tl.int64) * width
    if AHEAD:
        next_grad, next_x, next_residual_grad, next_rstd = _load_row(
            grad_ptr, total_ptr, residual_grad_ptr, rstd_ptr, program, rows, at, mask, ADD_RESIDUAL
        )
    for row in range(program, rows, programs):  # all loads come before the reduction over the row
        if AHEAD:
            grad, x, residual_grad, rstd = next_grad, next_x, next_residual_grad, next_rstd
            next_grad, next_x, next_residual_grad, next_rstd = _load_row(
                grad_ptr,
                total_ptr,
                residual_grad_ptr,
                rstd_ptr,
                row + programs,
                rows,
                at + apart,
                mask,
                ADD_RESIDUAL,
            )
        else:
            grad, x, residual_grad, rstd = _load_row(
                grad_ptr, total_ptr, residual_grad_ptr, rstd_ptr, row, rows, at, mask, ADD_RESIDUAL
            )
        grad = grad.to(tl.float32)
        unit = x.to(tl.float32) * rstd
        sums += grad * unit
        weighted = grad * weight
        out = (weighted - unit * (tl.sum(weighted * unit, 0) / width)) * rstd
        if ADD_RESIDUAL:
            out += residual_grad.to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
        if LOW:
            tl.store(low_ptr + at, out.to(low_ptr.dtype.element_ty), mask=mask)
        if NORMED:
            tl.store(normed_ptr + at, (unit * weight).to(normed_ptr.dtype.element_ty), mask=mask)
        at += apart
    tl.store(parts_ptr + program * width + columns, sums, mask=mask)


def rms_norm_backward(
    grad: Tensor,
    total: Tensor,
    rstd: Tensor,
    weight: Tensor,
    residual_grad: Tensor | None,
    out: Tensor,
    low: Tensor | None,
    normed: Tensor | None,
) -> Tensor:
    """See ``fused.rms_norm_backward``; returns the gradient of the weight."""
    rows, width = grad.shape
    block = triton.next_power_of_2(width)
    ahead = block == AHEAD_BLOCK
    warps = _warps(block, most=8 if ahead else 16)
    programs = min(rows, _multiprocessors(grad.device) * max(1, THREADS // (32 * warps)))
    parts = torch.empty(programs, width, dtype=torch.float32, device=grad.device)
    _rms_norm_backward[(programs,)](
        grad,
        total,
        rstd,
        weight,
        residual_grad,
        out,
        low,
        normed,
        parts,
        rows,
        width,
        ADD_RESIDUAL=residual_grad is not None,
        LOW=low is not None,
        NORMED=normed is not None,
        AHEAD=ahead,
        BLOCK=block,
        num_warps=warps,
    )
    # Not parts.sum(0): with few columns torch reduces through a buffer of twice the size of `parts`.
    return torch.mv(parts.t(), parts.new_ones(programs))


@triton.jit
def _embedding_lookup(table_ptr, tokens_ptr, out_ptr, vocab_size, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    known = (token >= 0) & (token < vocab_size)
    x = tl.load(table_ptr + token * width + columns, mask=mask & known, other=float("nan"))
    tl.store(out_ptr + row * width + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


def embedding_lookup(table: Tensor, tokens: Tensor, out: Tensor) -> None:
    """See ``fused.embedding_lookup``; a token outside the table gives NaN."""
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    warps = _warps(block, most=8)
    _embedding_lookup[(rows,)](table, tokens, out, len(table), width, BLOCK=block, num_warps=warps)


@triton.jit
def _embedding_grad(grad_ptr, tokens_ptr, table_ptr, vocab_size, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (columns < width) & (token >= 0) & (token < vocab_size)
    grad = tl.load(grad_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(table_ptr + token * width + columns, grad, mask=mask, sem="relaxed")


def embedding_grad(grad: Tensor, tokens: Tensor, table: Tensor) -> None:
    """See ``fused.embedding_grad``; the table starts as zeros."""
    rows, width = grad.shape
    block = triton.next_power_of_2(width)
    warps = _warps(block, most=8)
    _embedding_grad[(rows,)](grad, tokens, table, len(table), width, BLOCK=block, num_warps=warps)


@triton.jit
def _rotate(
    in_ptr,
    in_batch,
    in_head,
    in_token,
    out_ptr,
    out_token,
    cos_ptr,
    sin_ptr,
    length,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    SIGN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    heads = tl.arange(0, HEAD_BLOCK).to(tl.int64)[:, None]
    pairs = tl.arange(0, HALF)[None, :]
    mask = heads < HEADS
    source = in_ptr + batch * in_batch + token * in_token + heads * in_head + pairs
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    if SIGN != 0:
        cos = tl.load(cos_ptr + token * 2 * HALF + pairs)
        sin = tl.load(sin_ptr + token * 2 * HALF + pairs) * SIGN
        a, b = first.to(tl.float32), second.to(tl.float32)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
    target = out_ptr + row * out_token + heads * (2 * HALF) + pairs
    tl.store(target, first, mask=mask)
    tl.store(target + HALF, second, mask=mask)


def rotate(heads_BHTE: Tensor, out_NW: Tensor, column: int, cos: Tensor, sin: Tensor, sign: int) -> None:
    """RoPE of heads into columns of a (tokens, columns) matrix, which may be their own memory.

    Args:
        heads_BHTE: With a last stride of 1.
        out_NW: Contiguous.
        column: Column of the first head.
        cos: Cosines of every position and pair, (T, E).
        sin: Likewise.
        sign: 1 forward, -1 backward, 0 copies.
    """
    batch, heads, length, size = heads_BHTE.shape
    block = triton.next_power_of_2(heads)
    _rotate[(batch * length,)](
        heads_BHTE,
        heads_BHTE.stride(0),
        heads_BHTE.stride(1),
        heads_BHTE.stride(2),
        out_NW[:, column:],
        out_NW.stride(0),
        cos,
        sin,
        length,
        HEADS=heads,
        HEAD_BLOCK=block,
        HALF=size // 2,
        SIGN=sign,
        num_warps=_warps(block * size // 2, most=8),
    )


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate, up = _load_gate_up(gate_up_ptr, row * 2 * width + columns, width, mask)
    inner = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + columns, inner.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor, out: Tensor) -> None:
    """See ``fused.swiglu``."""
    rows, width = out.shape
    _swiglu[(rows, triton.cdiv(width, SWIGLU_BLOCK))](gate_up, out, width, BLOCK=SWIGLU_BLOCK, num_warps=8)


@triton.jit
def _swiglu_cast(gate_up_ptr, cast_ptr, scale_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gate, up = _load_gate_up(gate_up_ptr, row * 2 * width + columns, width, mask)
    inner = gate * tl.sigmoid(gate) * up
    _store_row(inner, row, cast_ptr, scale_ptr, row * width + columns, mask)


def swiglu_cast(gate_up: Tensor, cast: Tensor, scale: Tensor) -> None:
    """See ``fused.swiglu``."""
    rows, width = cast.shape
    block = triton.next_power_of_2(width)
    _swiglu_cast[(rows,)](gate_up, cast, scale, width, BLOCK=block, num_warps=_warps(block))


@triton.jit
def _swiglu_backward(
    gate_up_ptr, grad_ptr, out_ptr, inner_ptr, width, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    at = row * 2 * width + columns
    gate, up = _load_gate_up(gate_up_ptr, at, width, mask)
    grad = tl.load(grad_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    inner, to_gate, to_up = _swiglu_gradients(gate, up, grad)
    kind = out_ptr.dtype.element_ty
    if INNER:
        tl.store(inner_ptr + row * width + columns, inner.to(kind), mask=mask)
    tl.store(out_ptr + at, to_gate.to(kind), mask=mask)
    tl.store(out_ptr + at + width, to_up.to(kind), mask=mask)


def swiglu_backward(gate_up: Tensor, grad: Tensor, out: Tensor, inner: Tensor | None) -> None:
    """See ``fused.swiglu_backward``."""
    rows, width = grad.shape
    block = min(SWIGLU_BACKWARD_BLOCK, triton.next_power_of_2(width))
    grid, warps = (rows, triton.cdiv(width, block)), _warps(block)
    _swiglu_backward[grid](
        gate_up, grad, out, inner, width, INNER=inner is not None, BLOCK=block, num_warps=warps
    )


@triton.jit
def _swiglu_backward_amax(
    gate_up_ptr,
    grad_ptr,
    out_ptr,
    inner_ptr,
    out_amax_ptr,
    inner_amax_ptr,
    rows,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * ROWS * STEPS + tl.arange(0, ROWS)
    kind = out_ptr.dtype.element_ty
    of_gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_up = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_inner = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = first + step * ROWS
        mask = (row < rows)[:, None] & (columns < width)[None, :]
        at = row[:, None] * 2 * width + columns[None, :]
        half = row[:, None] * width + columns[None, :]
        gate, up = _load_gate_up(gate_up_ptr, at, width, mask)
        grad = tl.load(grad_ptr + half, mask=mask, other=0.0).to(tl.float32)
        inner, to_gate, to_up = _swiglu_gradients(gate, up, grad)
        inner, to_gate, to_up = inner.to(kind), to_gate.to(kind), to_up.to(kind)
        tl.store(inner_ptr + half, inner, mask=mask)
        tl.store(out_ptr + at, to_gate, mask=mask)
        tl.store(out_ptr + at + width, to_up, mask=mask)
        of_inner = tl.maximum(of_inner, tl.abs(inner.to(tl.float32)))
        of_gate = tl.maximum(of_gate, tl.abs(to_gate.to(tl.float32)))
        of_up = tl.maximum(of_up, tl.abs(to_up.to(tl.float32)))
    mask = columns < width
    tl.atomic_max(inner_amax_ptr + columns, tl.max(of_inner, 0), mask=mask, sem="relaxed")
    tl.atomic_max(out_amax_ptr + columns, tl.max(of_gate, 0), mask=mask, sem="relaxed")
    tl.atomic_max(out_amax_ptr + width + columns, tl.max(of_up, 0), mask=mask, sem="relaxed")


def swiglu_backward_amax(
    gate_up: Tensor, grad: Tensor, out: Tensor, inner: Tensor, out_amax: Tensor, inner_amax: Tensor
) -> None:
    """See ``fused.swiglu_backward_amax``; amax starts as zeros."""
    rows, width = grad.shape
    grid = (triton.cdiv(rows, WIDE_ROWS * WIDE_STEPS), triton.cdiv(width, WIDE_COLUMNS))
    _swiglu_backward_amax[grid](
        gate_up,
        grad,
        out,
        inner,
        out_amax,
        inner_amax,
        rows,
        width,
        ROWS=WIDE_ROWS,
        COLUMNS=WIDE_COLUMNS,
        STEPS=WIDE_STEPS,
        num_warps=8,
    )


@triton.jit
def _cast_rows(x_ptr, by_ptr, cast_ptr, scale_ptr, width, BY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    at = row * width + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if BY:
        x *= tl.load(by_ptr + columns, mask=mask, other=0.0)
    _store_row(x, row, cast_ptr, scale_ptr, at, mask)


def cast_rows(x: Tensor, by: Tensor | None, cast: Tensor, scale: Tensor) -> None:
    """See ``fused.cast_rows``."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _cast_rows[(rows,)](
        x, by, cast, scale, width, BY=by is not None, BLOCK=block, num_warps=_warps(block // 4)
    )


@triton.jit
def _column_amax(
    x_ptr, amax_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    best = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS * STEPS + tl.arange(0, ROWS)
    for step in range(STEPS):
        row = first + step * ROWS
        mask = (row < rows)[:, None] & (columns < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + columns[None, :], mask=mask, other=0.0)
        best = tl.maximum(best, tl.abs(x.to(tl.float32)))
    tl.atomic_max(amax_ptr + columns, tl.max(best, 0), mask=columns < width, sem="relaxed")


@triton.jit
def _cast_columns(
    x_ptr, amax_ptr, cast_ptr, scale_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < width)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * width + c[None, :], mask=mask, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.load(amax_ptr + c, mask=c < width, other=1.0), MIN_AMAX)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + c, amax / E4M3_MAX, mask=c < width)
    x = x / (amax / E4M3_MAX)[None, :]
    x = _clamp(x).to(cast_ptr.dtype.element_ty)
    tl.store(cast_ptr + c.to(tl.int64)[None, :] * rows + r[:, None], x, mask=mask)


def column_amax(x: Tensor, amax: Tensor) -> None:
    """See ``fused.column_amax``; amax starts as zeros."""
    rows, width = x.shape
    grid = (triton.cdiv(rows, AMAX_ROWS * AMAX_STEPS), triton.cdiv(width, AMAX_COLUMNS))
    _column_amax[grid](
        x, amax, rows, width, ROWS=AMAX_ROWS, COLUMNS=AMAX_COLUMNS, STEPS=AMAX_STEPS, num_warps=8
    )


def cast_columns(x: Tensor, amax: Tensor, cast: Tensor, scale: Tensor) -> None:
    """See ``fused.cast_columns``."""
    rows, width = x.shape
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS))
    _cast_columns[grid](x, amax, cast, scale, rows, width, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4)


@triton.jit
def _cast_transposed(x_ptr, scale_ptr, cast_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (r < rows)[:, None] & (c < width)[None, :]
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * width + c[None, :], mask=mask, other=0.0).to(tl.float32)
    x = x / tl.load(scale_ptr + r, mask=r < rows, other=1.0)[:, None]
    x = _clamp(x).to(cast_ptr.dtype.element_ty)
    tl.store(cast_ptr + c.to(tl.int64)[None, :] * rows + r[:, None], x, mask=mask)


def cast_transposed(x: Tensor, scale: Tensor, cast: Tensor) -> None:
    """See ``fused.cast_transposed``."""
    rows, width = x.shape
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, TILE_COLUMNS))
    _cast_transposed[grid](x, scale, cast, rows, width, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4)
