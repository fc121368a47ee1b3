"""Which chunks of each full tensor a rank has, and which of them it writes into a checkpoint.

A full tensor is a parameter of the whole model, or a tensor of its optimizer state, such as
``embed.weight:exp_avg``. Tensor and expert parallelism give a rank a **local tensor**: some rows or columns
of the full one. ZeRO gives it some rows of the local tensor. Both are described as :class:`Chunk`:
consecutive rows of the rank's tensor, and their slice of the full tensor. Usually there is one chunk per
tensor. With ``etp`` a rank has some rows of every expert, and each expert is a chunk. Padding of the
vocabulary is in no chunk.

Ranks with equal chunks are **replicas**. They share the writing: the rows of all their tensors, one tensor
after the other, are split into equal shares. So the chunks that all ranks write are a partition of every
full tensor, in every layout (a test proves it), and each byte is written once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from meshwright.layout.axes import EXPERT_AXIS, axis_rank, expert_axis, is_expert, state_axis
from meshwright.layout.fsdp_groups import chunk_rows, count_sharded
from meshwright.layout.optimizer_state import STEP_COUNT, count_state_tensors, rule_of, state_keys
from meshwright.layout.parameters import FLOAT32_BYTES, Parameter
from meshwright.layout.stages import local_parameter_kinds, locate_parameters, pp_rank_of
from meshwright.layout.tensor_parallel import count_kv_replicas, is_kv_projection, is_tp_replicated, tp_dim
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.model import DecoderModel

SELECTION_BIAS = "routers.selection_bias"
"""Name of the biases of expert selection, (layers with experts, experts)."""
STAGING_ALIGNMENT = 8
"""Each part begins at a multiple of this in staging memory: the widest element."""


@dataclass(frozen=True, order=True)
class TensorSlice:
    """A slice of a full tensor: its offset and its length in every dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> TensorSlice:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices that index the full tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    def rows(self, first: int, stop: int) -> TensorSlice:
        """Some of its rows, counted from its first row."""
        return TensorSlice((self.start[0] + first, *self.start[1:]), (stop - first, *self.shape[1:]))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all of its elements."""
        return len(self.shape) == len(shape) and all(
            start + size <= limit for start, size, limit in zip(self.start, self.shape, shape, strict=True)
        )

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """The elements of both; None if there are none."""
        starts = tuple(map(max, self.start, other.start))
        stops = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        ]
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return TensorSlice(starts, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, outer: TensorSlice) -> TensorSlice:
        """The same elements, counted from the first of an outer slice."""
        return TensorSlice(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a rank's tensor; a scalar has one row."""

    tensor: str
    """Name of the full tensor."""
    first: int
    """The first of the rows in the rank's tensor."""
    tensor_slice: TensorSlice
    """Their slice of the full tensor."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tensor_slice.shape[0] if self.tensor_slice.shape else 1

    @property
    def bytes(self) -> int:
        """Their size; all state is float32."""
        return self.tensor_slice.count * FLOAT32_BYTES


def list_state(job: Job, parameter: Parameter) -> dict[str, tuple[int, ...]]:
    """The full tensors of a parameter by name: itself and its optimizer state."""
    shape = parameter.shape
    keys = state_keys(rule_of(parameter.name, len(shape), job.train), job.train)
    states = {f"{parameter.name}:{key}": () if key == STEP_COUNT else shape for key in keys}
    return {parameter.name: shape, **states}


@functools.lru_cache(maxsize=4)
def list_full_tensors(job: Job) -> Mapping[str, tuple[int, ...]]:
    """All full tensors of parameters and optimizer state, with their shapes."""
    tensors: dict[str, tuple[int, ...]] = {}
    for parameter, _ in locate_parameters(job):
        tensors |= list_state(job, parameter)
    return MappingProxyType(tensors)


def local_chunks(job: Job, rank: int, name: str, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The rank's local tensor: what tp, ep and etp give it of a parameter, before ZeRO.

    Args:
        job: With a complete layout.
        rank: Global rank.
        name: Name of the parameter.
        shape: Shape of the full parameter.
    """
    return _local_tensor(job, rank, name, shape).chunks


def local_rows(job: Job, rank: int, name: str, shape: tuple[int, ...]) -> int:
    """Rows of the rank's local tensor, padding included."""
    return _local_tensor(job, rank, name, shape).rows


def row_chunks(job: Job, rank: int, name: str, shape: tuple[int, ...], rows: range) -> tuple[Chunk, ...]:
    """Some rows of the rank's local tensor; the first of them becomes row 0."""
    return tuple(_select_rows(_local_tensor(job, rank, name, shape).chunks, rows.start, rows.stop))


def shard_chunks(job: Job, rank: int, name: str, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The rank's optimizer shard of a parameter: the rows of its local tensor that ZeRO gives it."""
    local = _local_tensor(job, rank, name, shape)
    axis = state_axis(job, name)
    rows = chunk_rows(local.rows, axis.size, axis_rank(job.layout, rank, axis.name))
    return tuple(_select_rows(local.chunks, rows.start, rows.stop))


@functools.lru_cache(maxsize=4)
def written_chunks(job: Job, rank: int) -> tuple[Chunk, ...]:
    """The chunks that a rank writes into a checkpoint: its share of the chunks that its replicas also have.

    Args:
        job: With a complete layout.
        rank: Global rank.
    """
    by_replicas: dict[_Replicas, list[_ShardedTensor]] = {}
    for parameter, holder in locate_parameters(job):
        if holder != pp_rank_of(job, rank):
            continue
        name = parameter.name
        shard = _ShardedTensor(name, shard_chunks(job, rank, name, parameter.shape))
        for tensor, shape in list_state(job, parameter).items():
            if shape == parameter.shape:
                by_replicas.setdefault(_replicas_of(job, name), []).append(shard.named(tensor))
            else:  # a step count: every rank that has a part of the parameter has it
                scalar = _ShardedTensor(tensor, (Chunk(tensor, 0, TensorSlice.full(shape)),))
                by_replicas.setdefault(_Replicas("", 1, ""), []).append(scalar)
    written: list[Chunk] = []
    for replicas, tensors in by_replicas.items():
        ranks = _group_replicas(job.layout, replicas)[_coordinates(job.layout, rank, replicas)]
        written += _share(tensors, ranks.index(rank), len(ranks))
    return tuple(written)


def staging_bytes(sizes: Iterable[int]) -> int:
    """Memory for a copy of parts of these sizes, from which a checkpoint is written."""
    return sum(-(-size // STAGING_ALIGNMENT) * STAGING_ALIGNMENT for size in sizes)


def predict_staging_bytes(job: Job, rank: int) -> int:
    """Staging memory of a rank, if replicas share their rows evenly; the real one differs by a few rows."""
    total = 0.0
    for parameter in local_parameter_kinds(job, pp_rank_of(job, rank)):
        replicas = _replicas_of(job, parameter.name)
        ranks = _group_replicas(job.layout, replicas)[_coordinates(job.layout, rank, replicas)]
        tensors = 1 + count_state_tensors(parameter, job.train)
        total += tensors * count_sharded(job, parameter, rank) * FLOAT32_BYTES / len(ranks)
    return round(total)


@dataclass(frozen=True)
class _LocalTensor:
    """A local tensor as chunks; the rows that follow the last one are padding."""

    chunks: tuple[Chunk, ...]
    rows: int


@dataclass(frozen=True)
class _ShardedTensor:
    """One tensor of a rank as chunks."""

    name: str
    chunks: tuple[Chunk, ...]

    def named(self, name: str) -> _ShardedTensor:
        """A tensor that is sharded in the same way."""
        return _ShardedTensor(name, tuple(Chunk(name, c.first, c.tensor_slice) for c in self.chunks))


class _Replicas(NamedTuple):
    """The axes that give ranks of a pipeline stage different chunks; ranks equal on them are replicas."""

    inner_axis: str
    """``tp`` or ``ep``; empty if neither shards the parameter."""
    inner_replicas: int
    """Consecutive ranks of that axis with equal local tensors."""
    shard_axis: str
    """The axis of ZeRO."""


def _replicas_of(job: Job, name: str) -> _Replicas:
    shard_axis, layout = state_axis(job, name).name, job.layout
    if is_expert(name):
        if expert_axis(layout).size == 1:
            return _Replicas("", 1, shard_axis)
        return _Replicas(EXPERT_AXIS, layout.etp if expert_dim(name) is None else 1, shard_axis)
    if layout.tp == 1 or is_tp_replicated(name):
        return _Replicas("", 1, shard_axis)
    return _Replicas("tp", _tp_replicas(job, name), shard_axis)


def _tp_replicas(job: Job, name: str) -> int:
    assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
    return count_kv_replicas(job.model, job.layout.tp) if is_kv_projection(name) else 1


def _coordinates(layout: Layout, rank: int, replicas: _Replicas) -> tuple[int, int, int]:
    """Equal for ranks with equal chunks."""
    return (
        axis_rank(layout, rank, "pp"),
        axis_rank(layout, rank, replicas.inner_axis) // replicas.inner_replicas,
        axis_rank(layout, rank, replicas.shard_axis),
    )


@functools.lru_cache(maxsize=64)
def _group_replicas(layout: Layout, replicas: _Replicas) -> dict[tuple[int, int, int], list[int]]:
    """The ranks with each coordinates, in order."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(_coordinates(layout, rank, replicas), []).append(rank)
    return groups


def _share(tensors: list[_ShardedTensor], index: int, replicas: int) -> Iterator[Chunk]:
    """The chunks of one replica: those rows that begin in its part of all elements."""
    chunks = [chunk for tensor in tensors for chunk in tensor.chunks]
    ends = list(itertools.accumulate(chunk.tensor_slice.count for chunk in chunks))
    total = ends[-1] if ends else 0
    begin, stop = total * index // replicas, total * (index + 1) // replicas
    for chunk, end in zip(chunks, ends, strict=True):
        start, row = end - chunk.tensor_slice.count, chunk.tensor_slice.count // max(chunk.rows, 1)
        rows = [min(max(-(-(limit - start) // row), 0), chunk.rows) for limit in (begin, stop)]
        if rows[0] < rows[1]:
            part = chunk.tensor_slice if not chunk.tensor_slice.shape else chunk.tensor_slice.rows(*rows)
            yield Chunk(chunk.tensor, chunk.first + rows[0], part)


def _select_rows(chunks: tuple[Chunk, ...], start: int, stop: int) -> Iterator[Chunk]:
    """Some rows of a tensor; the first of them becomes row 0."""
    for chunk in chunks:
        first, last = max(start, chunk.first), min(stop, chunk.first + chunk.rows)
        if first < last:
            yield Chunk(
                chunk.tensor, first - start, chunk.tensor_slice.rows(first - chunk.first, last - chunk.first)
            )


def _local_tensor(job: Job, rank: int, name: str, shape: tuple[int, ...]) -> _LocalTensor:
    if is_expert(name):
        return _expert_tensor(job, rank, name, shape)
    dim = tp_dim(name)
    if job.layout.tp == 1 or dim is None:
        return _LocalTensor((Chunk(name, 0, TensorSlice.full(shape)),), shape[0])
    replicas = _tp_replicas(job, name)
    index, shards = axis_rank(job.layout, rank, "tp") // replicas, job.layout.tp // replicas
    length = -(-shape[dim] // shards)
    part = chunk_rows(shape[dim], shards, index)
    tensor_slice = _split_dim(TensorSlice.full(shape), dim, part.start, len(part))
    chunks = (Chunk(name, 0, tensor_slice),) if tensor_slice.count else ()
    return _LocalTensor(chunks, length if dim == 0 else shape[0])


def _split_dim(tensor_slice: TensorSlice, dim: int, first: int, size: int) -> TensorSlice:
    start, shape = list(tensor_slice.start), list(tensor_slice.shape)
    start[dim], shape[dim] = start[dim] + first, size
    return TensorSlice(tuple(start), tuple(shape))


def expert_dim(name: str) -> int | None:
    """The dim of (experts, rows of one, columns) that ``etp`` shards; None where it shards none."""
    *_, module, leaf = name.split(".")
    if module != "down":
        return 1
    return 2 if leaf == "weight" else None


def _expert_tensor(job: Job, rank: int, name: str, shape: tuple[int, ...]) -> _LocalTensor:
    """The experts of an ep rank, and with etp its rows or columns of each. Rows of an expert are together."""
    layout = job.layout
    assert isinstance(job.model, DecoderModel), "only decoders have experts"
    ep_rank, etp_rank = divmod(axis_rank(layout, rank, EXPERT_AXIS), layout.etp)
    rows, experts = shape[0] // layout.ep, (job.model.num_experts or 0) // layout.ep
    tensor_slice = TensorSlice.full(shape).rows(ep_rank * rows, (ep_rank + 1) * rows)
    dim = expert_dim(name)
    if dim is None or layout.etp == 1:
        return _LocalTensor((Chunk(name, 0, tensor_slice),), rows)
    if dim == 2:  # columns
        columns = shape[1] // layout.etp
        return _LocalTensor((Chunk(name, 0, _split_dim(tensor_slice, 1, etp_rank * columns, columns)),), rows)
    each, part = rows // experts, rows // experts // layout.etp
    chunks = [
        Chunk(name, expert * part, tensor_slice.rows(start := expert * each + etp_rank * part, start + part))
        for expert in range(experts)
    ]
    return _LocalTensor(tuple(chunks), experts * part)
