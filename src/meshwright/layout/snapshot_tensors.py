"""The tensors in a rank's in-memory snapshot: their order, and which part of which full tensor each one is.

A snapshot has no table of contents (``layout.snapshot_size``). The layout of its run determines the content:
with this module, a rank of another layout finds the chunks that it needs in the snapshots of earlier ranks.
The rank that writes a snapshot stores :func:`fingerprint` of its tensors, and the reader compares it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from meshwright.layout.axes import axis_rank, state_axis
from meshwright.layout.fsdp_groups import chunk_rows
from meshwright.layout.optimizer_state import STEP_COUNT, rule_of, state_keys
from meshwright.layout.parameters import FLOAT32_BYTES, list_parameters, selection_bias_shape
from meshwright.layout.resnet_shapes import list_convs
from meshwright.layout.stages import local_parameters, pp_rank_of
from meshwright.layout.state_chunks import (
    SELECTION_BIAS,
    Chunk,
    TensorSlice,
    local_chunks,
    local_rows,
    shard_chunks,
)
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel


@dataclass(frozen=True)
class SnapshotTensor:
    """One tensor of a snapshot. All state is float32."""

    name: str
    """Name of the full tensor: a parameter, ``parameter:key`` of optimizer state, or a buffer."""
    rows: int
    """Rows in memory, padding included; a scalar has one."""
    row_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements in memory."""
        return self.rows * math.prod(self.row_shape)

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return self.numel * FLOAT32_BYTES


def list_snapshot_tensors(job: Job, rank: int) -> list[SnapshotTensor]:
    """The tensors of a rank's snapshot, in the order of ``checkpoint.state_snapshots``.

    Args:
        job: With a complete layout.
        rank: Global rank.
    """
    shapes = {parameter.name: parameter.shape for parameter in list_parameters(job.model)}
    names = [parameter.name for parameter in local_parameters(job, pp_rank_of(job, rank))]
    parameters, states = [], []
    for name in names:
        shape = shapes[name]
        rows = chunk_rows(
            local_rows(job, rank, name, shape),
            state_axis(job, name).size,
            axis_rank(job.layout, rank, state_axis(job, name).name),
        )
        shard = _describe(name, len(rows), shape, shard_chunks(job, rank, name, shape))
        if job.layout.zero >= 2:
            parameters.append(shard)
        else:
            local = local_chunks(job, rank, name, shape)
            parameters.append(_describe(name, local_rows(job, rank, name, shape), shape, local))
        for key in sorted(state_keys(rule_of(name, len(shape), job.train), job.train)):
            full = f"{name}:{key}"
            if key == STEP_COUNT:
                states.append(SnapshotTensor(full, 1, (), (Chunk(full, 0, TensorSlice.full(())),)))
            else:
                renamed = tuple(Chunk(full, chunk.first, chunk.tensor_slice) for chunk in shard.chunks)
                states.append(SnapshotTensor(full, shard.rows, shard.row_shape, renamed))
    return [*parameters, *states, *_list_extra(job)]


def _describe(name: str, rows: int, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> SnapshotTensor:
    row_shape = chunks[0].tensor_slice.shape[1:] if chunks else shape[1:]
    return SnapshotTensor(name, rows, row_shape, chunks)


def _list_extra(job: Job) -> list[SnapshotTensor]:
    """Tensors that are equal on all ranks."""
    model = job.model
    if isinstance(model, ResNetModel) and job.mixes_samples:
        return [
            _whole(f"{conv.name}.norm.{part}", (conv.out_channels,))
            for conv in list_convs(model).convs
            for part in ("running_mean", "running_var")
        ]
    shape = selection_bias_shape(model)
    return [] if shape is None else [_whole(SELECTION_BIAS, shape)]


def _whole(name: str, shape: tuple[int, ...]) -> SnapshotTensor:
    return SnapshotTensor(name, shape[0], shape[1:], (Chunk(name, 0, TensorSlice.full(shape)),))


def fingerprint(tensors: Iterable[tuple[str, int]]) -> str:
    """A hash of names and numbers of elements, in order."""
    return hashlib.sha256(json.dumps(list(tensors)).encode()).hexdigest()[:16]


def covers_state(job: Job, ranks: Collection[int]) -> bool:
    """Whether the snapshots of some ranks have every element of every full tensor together.

    Args:
        job: With the layout of these ranks.
        ranks: Global ranks in that layout.
    """
    if any(rank >= job.layout.world_size for rank in ranks):
        return False  # of another layout
    shapes = {parameter.name: parameter.shape for parameter in list_parameters(job.model)}
    held: dict[str, set[TensorSlice]] = {name: set() for name in shapes}
    for rank in ranks:
        for parameter in local_parameters(job, pp_rank_of(job, rank)):
            # Optimizer state has the finest chunks: where it is whole, parameters are, too.
            chunks = shard_chunks(job, rank, parameter.name, shapes[parameter.name])
            held[parameter.name].update(chunk.tensor_slice for chunk in chunks)
    # Chunks of different ranks are equal or have no element in common.
    return all(sum(one.count for one in held[name]) == math.prod(shape) for name, shape in shapes.items())
