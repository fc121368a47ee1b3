"""Triton kernels of the loss; imported only on GPUs. See ``triton_block``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every logit; -inf minus -inf would be NaN."""
LOSS_BLOCK, LOSS_BLOCKS = 8192, 4
SCALE_BLOCK = 8192


@triton.jit
def _cross_entropy(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    factor,
    vocab_size,
    IGNORE_INDEX: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    counted = target != IGNORE_INDEX
    logits_ptr += row * vocab_size
    of_target = tl.load(logits_ptr + tl.where(counted, target, 0)).to(tl.float32)  # before it is overwritten
    largest = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    # Maximum of several blocks first, then their sum: the earlier sum is rescaled once for all of them.
    for start in range(0, vocab_size, BLOCKS * BLOCK):
        larger = largest
        for number in tl.static_range(BLOCKS):
            columns = start + number * BLOCK + tl.arange(0, BLOCK)
            mask = columns < vocab_size
            x = tl.load(logits_ptr + columns, mask=mask, other=LOWEST, eviction_policy="evict_last")
            larger = tl.maximum(larger, x.to(tl.float32) * LOG2_E)
        sums = sums * tl.exp2(largest - larger)
        for number in tl.static_range(BLOCKS):
            columns = start + number * BLOCK + tl.arange(0, BLOCK)
            mask = columns < vocab_size
            x = tl.load(logits_ptr + columns, mask=mask, other=LOWEST, eviction_policy="evict_last")
            sums += tl.exp2(x.to(tl.float32) * LOG2_E - larger)
        largest = larger
    top = tl.max(largest, 0)
    total = tl.sum(sums * tl.exp2(largest - top), 0)
    tl.store(losses_ptr + row, tl.where(counted, tl.log(total) + top / LOG2_E - of_target, 0.0))
    if GRADIENT:
        factor = tl.where(counted, factor, 0.0)
        for start in range(0, vocab_size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < vocab_size
            x = tl.load(logits_ptr + columns, mask=mask, other=LOWEST, eviction_policy="evict_first")
            grad = tl.exp2(x.to(tl.float32) * LOG2_E - top) / total
            grad = (grad - tl.where(columns == target, 1.0, 0.0)) * factor
            tl.store(logits_ptr + columns, grad.to(logits_ptr.dtype.element_ty), mask=mask)


def cross_entropy(
    logits: Tensor, targets: Tensor, losses: Tensor, factor: float, ignored: int, gradient: bool
) -> None:
    """See ``fused.cross_entropy``."""
    rows, vocab_size = logits.shape
    _cross_entropy[(rows,)](
        logits,
        targets,
        losses,
        factor,
        vocab_size,
        IGNORE_INDEX=ignored,
        GRADIENT=gradient,
        BLOCK=LOSS_BLOCK,
        BLOCKS=LOSS_BLOCKS,
        num_warps=32,
    )


@triton.jit
def _scale(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < count, other=0.0)
        tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x.dtype), mask=at < count)


def scale(x: Tensor, factor: Tensor) -> None:
    """See ``fused.scale``."""
    count = x.numel()
    _scale[(triton.cdiv(count, SCALE_BLOCK),)](x, factor, count, BLOCK=SCALE_BLOCK, num_warps=16)
