"""AdamW of many parameters in one kernel, in Triton: imported where there is a GPU, only then.

A table on the device says where each parameter lies, with its gradient, its moments and its copy; a program
moves one chunk of one of them. So a step is a few launches however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.layout.optimizer_state import UPDATE_CHUNK
from meshwright.train.optimizers.adamw import ParameterUpdate

WARPS = 4
"""How many share a chunk."""
ALIGNED_BYTES = ALIGNED_ELEMENTS = 16
"""How what is read in long words lies, and ends."""
COLUMNS = 6
"""Of the table: five addresses and the number of elements."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Kind(NamedTuple):
    """Parameters that one launch moves together."""

    gradient: torch.dtype
    low: torch.dtype | None
    aligned: bool
    """Whether their memory can be read in long words."""


Place = tuple[tuple[int, ...], torch.dtype, torch.dtype | None]
"""Of a parameter: its row of the table, and what types its gradient and its copy have."""


class ParameterTable:
    """Where parameters lie; on the device, and there again only if something has moved."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._sizes: list[tuple[Kind, int]] = []
        self._on_device: Tensor
        self.chunks: dict[Kind, Tensor]
        """By kind, of each chunk the number of the parameter and its own."""

    def update(self, moved: Sequence[ParameterUpdate]) -> Tensor:
        """The table of these parameters."""
        places = [_place_of(each) for each in moved]
        if places == self._places:
            return self._on_device
        assert all(t is None or t.is_contiguous() for each in moved for t in each), "strides are not read"
        device, sizes = moved[0].parameter.device, [_size_of(place) for place in places]
        if sizes != self._sizes:
            self.chunks = _cut(sizes, device)
        self._places, self._sizes = places, sizes
        rows = torch.tensor([row for row, _, _ in places])  # the host does not wait for what follows
        self._on_device = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
        return self._on_device


def _place_of(moved: ParameterUpdate) -> Place:
    row = *(0 if tensor is None else tensor.data_ptr() for tensor in moved), moved.parameter.numel()
    return row, moved.gradient.dtype, None if moved.low is None else moved.low.dtype


def _size_of(place: Place) -> tuple[Kind, int]:
    (*addresses, count), gradient, low = place
    aligned = all(address % ALIGNED_BYTES == 0 for address in addresses) and count % ALIGNED_ELEMENTS == 0
    return Kind(gradient, low, aligned), count


def _cut(sizes: Sequence[tuple[Kind, int]], device: torch.device) -> dict[Kind, Tensor]:
    cut: dict[Kind, list[Tensor]] = {}
    for number, (kind, count) in enumerate(sizes):
        chunks = torch.arange(triton.cdiv(count, UPDATE_CHUNK), dtype=torch.int32)
        cut.setdefault(kind, []).append(torch.stack((torch.full_like(chunks, number), chunks), dim=1))
    return {kind: torch.cat(parts).to(device) for kind, parts in cut.items()}


@triton.jit
def _at(row_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row_ptr + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _adamw(
    table_ptr,
    chunks_ptr,
    scalars_ptr,
    new_in_mean,
    old_in_square,
    new_in_square,
    eps,
    COLUMNS: tl.constexpr,
    GRADIENT: tl.constexpr,
    LOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    number = tl.load(chunks_ptr + 2 * chunk)
    at = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = table_ptr + number * COLUMNS
    parameter_ptr = _at(row_ptr, 0, tl.float32, ALIGNED)
    gradient_ptr = _at(row_ptr, 1, GRADIENT, ALIGNED)
    mean_ptr = _at(row_ptr, 2, tl.float32, ALIGNED)
    square_ptr = _at(row_ptr, 3, tl.float32, ALIGNED)
    count = tl.load(row_ptr + 5)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    there = at < count
    rate = tl.load(scalars_ptr + 4 * number)
    correction = tl.load(scalars_ptr + 4 * number + 1)
    kept = tl.load(scalars_ptr + 4 * number + 2)
    factor = tl.load(scalars_ptr + 4 * number + 3)
    gradient = tl.load(gradient_ptr + at, mask=there, other=0.0).to(tl.float32) * factor
    mean = tl.load(mean_ptr + at, mask=there, other=0.0)
    square = tl.load(square_ptr + at, mask=there, other=0.0)
    parameter = tl.load(parameter_ptr + at, mask=there, other=0.0)
    mean += (gradient - mean) * new_in_mean
    square = square * old_in_square + gradient * gradient * new_in_square
    parameter = parameter * kept - tl.div_rn(rate * mean, tl.sqrt_rn(square) * correction + eps)
    tl.store(mean_ptr + at, mean, mask=there)
    tl.store(square_ptr + at, square, mask=there)
    tl.store(parameter_ptr + at, parameter, mask=there)
    if LOW is not None:
        low_ptr = _at(row_ptr, 4, LOW, ALIGNED)
        tl.store(low_ptr + at, parameter.to(LOW), mask=there)


def move(
    table: ParameterTable,
    moved: Sequence[ParameterUpdate],
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """A step of parameters on one device, in place.

    Args:
        table: Of the optimizer.
        moved: Float32 masters in memory of their own order.
        scalars: A row for each, as ``adamw.update_parameter`` reads them.
        betas: Weights of the past in both means.
        eps: Added to the root.
    """
    rows = table.update(moved)
    for kind, chunks in table.chunks.items():
        _adamw[(len(chunks),)](
            rows,
            chunks,
            scalars,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            COLUMNS=COLUMNS,
            GRADIENT=TYPES[kind.gradient],
            LOW=None if kind.low is None else TYPES[kind.low],
            ALIGNED=kind.aligned,
            BLOCK=UPDATE_CHUNK,
            num_warps=WARPS,
        )
