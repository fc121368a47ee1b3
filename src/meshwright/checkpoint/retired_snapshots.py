"""Reads the in-memory snapshots of ranks of an earlier layout, to go on in another one without a checkpoint.

The agent keeps the memory of all ranks that ran on its node, also of those that died. A rank of the new
layout reads the chunks that it needs from it, as it would from the files of a checkpoint.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.resume import load_tensors
from meshwright.checkpoint.state import CheckpointedState
from meshwright.checkpoint.state_snapshots import HAS_BIASES, restore_counters
from meshwright.core.errors import Problem, RunFailedError
from meshwright.launch.snapshot_slots import SnapshotSlots
from meshwright.layout.parameters import FLOAT32_BYTES
from meshwright.layout.snapshot_size import COUNTER_BYTES, TENSOR_ALIGNMENT, align, slot_bytes, slot_start
from meshwright.layout.snapshot_tensors import SnapshotTensor, fingerprint, list_snapshot_tensors
from meshwright.layout.state_chunks import SELECTION_BIAS, TensorSlice
from meshwright.spec.job import Job


class _KeptChunk(NamedTuple):
    """A chunk of a full tensor in the memory of one rank."""

    memory: mmap.mmap
    offset: int
    tensor_slice: TensorSlice


class RetiredSnapshots:
    """The full tensors that the snapshots of some ranks have together."""

    def __init__(self, job: Job, step: int, paths: Mapping[int, str]) -> None:
        """Open the memory of ranks of an earlier layout.

        Args:
            job: With that layout.
            step: Step of the snapshots to read; ranks without one are left out.
            paths: Memory of each rank.

        Raises:
            RunFailedError: A snapshot does not have the tensors of the layout.
        """
        self.step, self.counters = step, dict[str, Any]()
        self._maps: list[mmap.mmap] = []
        self._chunks: dict[str, dict[TensorSlice, _KeptChunk]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for rank, path in paths.items():
            slots = SnapshotSlots(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            try:
                if step in slots.steps():
                    self._add(job, rank, slots)
            finally:
                slots.close()

    @property
    def location(self) -> str:
        """For errors."""
        return "in-memory snapshots"

    def names(self) -> list[str]:
        """The names of all full tensors."""
        return [name for name in self._chunks if name != SELECTION_BIAS or self.counters[HAS_BIASES]]

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Read a full tensor, or a part of it, into new memory.

        Raises:
            RunFailedError: Some of it is missing.
        """
        chunks = self._chunks.get(name, {}).values()
        tensor_slice = tensor_slice or TensorSlice.full(_full_shape([chunk.tensor_slice for chunk in chunks]))
        values, missing = torch.empty(tensor_slice.shape), tensor_slice.count
        for chunk in chunks:
            common = tensor_slice.intersect(chunk.tensor_slice)
            if common is not None:
                kept = torch.frombuffer(
                    chunk.memory, dtype=torch.float32, count=chunk.tensor_slice.count, offset=chunk.offset
                )
                part = kept.view(chunk.tensor_slice.shape)[common.relative_to(chunk.tensor_slice).index]
                values[common.relative_to(tensor_slice).index] = part
                missing -= common.count
        if missing:
            raise self._broken(f"lack {missing} of the {tensor_slice.count} elements of {name}")
        return values

    def close(self) -> None:
        """Release the memory."""
        self._chunks = {}
        for memory in self._maps:
            memory.close()

    def _add(self, job: Job, rank: int, slots: SnapshotSlots) -> None:
        tensors = list_snapshot_tensors(job, rank)
        size = slot_bytes(tensor.bytes for tensor in tensors)
        start = slot_start(slots.steps().index(self.step), slots.slot_bytes)
        memory = mmap.mmap(slots.fd, slots.reserved_bytes, flags=mmap.MAP_PRIVATE)  # torch wants it writable
        self._maps.append(memory)
        content: dict[str, Any] = json.loads(memory[start : start + COUNTER_BYTES])
        expected = fingerprint((tensor.name, tensor.numel) for tensor in tensors)
        if (slots.slot_bytes, content.get("tensors")) != (size, expected):
            raise self._broken(f"of rank {rank} have other tensors than its plan")
        self.counters = content
        offset = start + COUNTER_BYTES
        for tensor in tensors:
            self._add_tensor(tensor, memory, offset)
            offset += align(tensor.bytes, TENSOR_ALIGNMENT)

    def _add_tensor(self, tensor: SnapshotTensor, memory: mmap.mmap, offset: int) -> None:
        """Replicas have equal chunks; the first one counts."""
        row = tensor.numel // max(tensor.rows, 1) * FLOAT32_BYTES
        known = self._chunks.setdefault(tensor.name, {})
        for chunk in tensor.chunks:
            known.setdefault(
                chunk.tensor_slice, _KeptChunk(memory, offset + chunk.first * row, chunk.tensor_slice)
            )

    def _broken(self, rule: str) -> RunFailedError:
        fix = "Resume the run from its newest checkpoint"
        return RunFailedError(Problem("snapshot-broken", rule, self.location, fix=fix))


def _full_shape(slices: list[TensorSlice]) -> tuple[int, ...]:
    ends = [tuple(a + n for a, n in zip(one.start, one.shape, strict=True)) for one in slices]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def restore_resharded(state: CheckpointedState, snapshots: RetiredSnapshots, rank: int) -> None:
    """Restore tensors and counters of a rank from the snapshots of another layout.

    Args:
        state: State of this rank; overwritten.
        snapshots: Snapshots of all ranks that this node had before.
        rank: Rank of this process.
    """
    load_tensors(state, snapshots, rank)
    restore_counters(state, snapshots.counters)
