"""AdamW of many parameters in one Triton kernel; imported on a GPU only.

A table on the device holds the addresses of each parameter, its gradient, moments and copy. One program
updates one chunk of one parameter. So a step takes a few launches, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshwright.layout.optimizer_state import UPDATE_CHUNK
from meshwright.train.optimizers.parameter_update import ParameterUpdate

WARPS = 4
"""Per chunk."""
ALIGNED_BYTES = ALIGNED_ELEMENTS = 16
"""Alignment of addresses and sizes that allows vectorised loads."""
COLUMNS = 6
"""Columns of the table: five addresses and the number of elements."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LaunchGroup(NamedTuple):
    """Properties of the parameters that one launch updates."""

    grad: torch.dtype
    copy: torch.dtype | None
    aligned: bool
    """Whether vectorised loads are possible."""


Location = tuple[tuple[int, ...], torch.dtype, torch.dtype | None]
"""Location of a parameter: its row of the table, and the dtypes of its gradient and its copy."""


class ParameterTable:
    """The table on the device; copied again only if an address has changed."""

    def __init__(self) -> None:
        self._locations: list[Location] = []
        self._sizes: list[tuple[LaunchGroup, int]] = []
        self._on_device: Tensor
        self.chunks: dict[LaunchGroup, Tensor]
        """Per launch: of each chunk the index of its parameter, and its own index in the parameter."""

    def refresh(self, updates: Sequence[ParameterUpdate]) -> Tensor:
        """The table of these parameters."""
        locations = [_locate(update) for update in updates]
        if locations == self._locations:
            return self._on_device
        assert all(t is None or t.is_contiguous() for update in updates for t in update), (
            "the kernel reads no strides"
        )
        device, sizes = updates[0].parameter.device, [_measure(location) for location in locations]
        if sizes != self._sizes:
            self.chunks = _split_into_chunks(sizes, device)
        self._locations, self._sizes = locations, sizes
        rows = torch.tensor([row for row, _, _ in locations])  # pinned, so that the CPU does not wait
        self._on_device = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
        return self._on_device


def _locate(update: ParameterUpdate) -> Location:
    row = *(0 if tensor is None else tensor.data_ptr() for tensor in update), update.parameter.numel()
    return row, update.grad.dtype, None if update.copy is None else update.copy.dtype


def _measure(location: Location) -> tuple[LaunchGroup, int]:
    (*addresses, count), grad, copy = location
    aligned = all(address % ALIGNED_BYTES == 0 for address in addresses) and count % ALIGNED_ELEMENTS == 0
    return LaunchGroup(grad, copy, aligned), count


def _split_into_chunks(
    sizes: Sequence[tuple[LaunchGroup, int]], device: torch.device
) -> dict[LaunchGroup, Tensor]:
    chunks: dict[LaunchGroup, list[Tensor]] = {}
    for number, (group, count) in enumerate(sizes):
        own = torch.arange(triton.cdiv(count, UPDATE_CHUNK), dtype=torch.int32)
        chunks.setdefault(group, []).append(torch.stack((torch.full_like(own, number), own), dim=1))
    return {group: torch.cat(parts).to(device) for group, parts in chunks.items()}


@triton.jit
def _at(row_ptr, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row_ptr + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _adamw(
    table_ptr,
    chunks_ptr,
    scalars_ptr,
    new_in_first,
    old_in_second,
    new_in_second,
    eps,
    COLUMNS: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0)
    number = tl.load(chunks_ptr + 2 * chunk)
    at = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_ptr = table_ptr + number * COLUMNS
    parameter_ptr = _at(row_ptr, 0, tl.float32, ALIGNED)
    grad_ptr = _at(row_ptr, 1, GRAD, ALIGNED)
    first_ptr = _at(row_ptr, 2, tl.float32, ALIGNED)
    second_ptr = _at(row_ptr, 3, tl.float32, ALIGNED)
    count = tl.load(row_ptr + 5)
    if ALIGNED:
        count = tl.multiple_of(count, 16)
    rate = tl.load(scalars_ptr + 4 * number)
    correction = tl.load(scalars_ptr + 4 * number + 1)
    decay = tl.load(scalars_ptr + 4 * number + 2)
    clipping = tl.load(scalars_ptr + 4 * number + 3)
    inside = (at < count) & (clipping >= 0)  # not of NaN: the gradient norm is not finite
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * clipping
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    parameter = tl.load(parameter_ptr + at, mask=inside, other=0.0)
    first += (grad - first) * new_in_first
    second = second * old_in_second + grad * grad * new_in_second
    parameter = parameter * decay - tl.div_rn(rate * first, tl.sqrt_rn(second) * correction + eps)
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(parameter_ptr + at, parameter, mask=inside)
    if COPY is not None:
        copy_ptr = _at(row_ptr, 4, COPY, ALIGNED)
        tl.store(copy_ptr + at, parameter.to(COPY), mask=inside)


def adamw_step(
    table: ParameterTable,
    updates: Sequence[ParameterUpdate],
    scalars: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update parameters of one device in place.

    Args:
        table: Table of the optimizer.
        updates: Contiguous float32 master weights, with their tensors.
        scalars: One row per parameter, see ``update_parameter``.
        betas: Decay of the two moments.
        eps: Added to the denominator.
    """
    rows = table.refresh(updates)
    for group, chunks in table.chunks.items():
        _adamw[(len(chunks),)](
            rows,
            chunks,
            scalars,
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
            COLUMNS=COLUMNS,
            GRAD=TYPES[group.grad],
            COPY=None if group.copy is None else TYPES[group.copy],
            ALIGNED=group.aligned,
            BLOCK=UPDATE_CHUNK,
            num_warps=WARPS,
        )
