"""In-memory snapshots of one rank's state, for a quick restart after a failure.

Two slots are written in turn (``launch.snapshot_slots``). Every step has a control all-reduce. So no rank
overwrites a slot before all ranks have written the other one, and there is always a step of which every
rank has a complete snapshot. A restored snapshot is equal bit by bit.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.state import CheckpointedState
from meshwright.core.events import Commit
from meshwright.launch.snapshot_slots import EMPTY, SnapshotSlots
from meshwright.layout.parameters import selection_bias_shape
from meshwright.layout.snapshot_size import (
    COUNTER_BYTES,
    TENSOR_ALIGNMENT,
    align,
    reserved_bytes,
    slot_bytes,
    slot_start,
)
from meshwright.layout.snapshot_tensors import fingerprint
from meshwright.layout.state_chunks import SELECTION_BIAS

HAS_BIASES = "has_selection_bias"
"""In the counters of a snapshot: whether the run had selection biases. Without them the tensor is zero."""


class StateSnapshots:
    """Writes and restores the snapshots of one rank."""

    def __init__(
        self,
        memory: SnapshotSlots,
        state: CheckpointedState,
        every_steps: int,
        commit: Commit = nullcontext,
    ) -> None:
        """Reserve the memory, unless an earlier generation has done it.

        Args:
            memory: Memory of this rank, kept by the agent.
            state: State of this rank.
            every_steps: Interval.
            commit: Entered when a slot changes; raises where this rank must write no more.

        Raises:
            OSError: There is not enough memory.
        """
        self._memory, self._state, self._every, self._commit = memory, state, every_steps, commit
        named = _list_tensors(state)
        self.slot_bytes = slot_bytes(tensor.nbytes for _, tensor in named)
        self._fingerprint = fingerprint((name, tensor.numel()) for name, tensor in named)
        if memory.slot_bytes != self.slot_bytes:
            memory.reserve(self.slot_bytes)
        self._map = mmap.mmap(memory.fd, reserved_bytes(self.slot_bytes))

    @property
    def reserved_bytes(self) -> int:
        """CPU memory of both snapshots."""
        return self._memory.reserved_bytes

    def after_step(self) -> None:
        """Take a snapshot, if it is due."""
        if self._state.counters.step % self._every == 0:
            self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Copy the state into the slot that holds the older snapshot."""
        steps = self._memory.steps()
        slot = steps.index(min(steps))
        with self._commit():
            self._memory.set_step(slot, EMPTY)
        for tensor, copy in self._pairs(slot):
            copy.copy_(tensor)
        counters = {
            "counters": asdict(self._state.counters),
            "loss_scale": self._state.loss_scaler.state_dict(),
            "tensors": self._fingerprint,
            HAS_BIASES: self._state.expert_biases is not None
            and self._state.expert_biases.bias_LE is not None,
        }
        content = json.dumps(counters).encode()
        assert len(content) < COUNTER_BYTES, f"counters of {len(content)} bytes"
        start = self._start(slot)
        self._map[start : start + COUNTER_BYTES] = content.ljust(COUNTER_BYTES)
        with self._commit():
            self._memory.set_step(slot, self._state.counters.step)

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Restore the snapshot of a step."""
        slot = self._memory.steps().index(step)
        start = self._start(slot)
        content = json.loads(self._map[start : start + COUNTER_BYTES])
        biases = self._state.expert_biases
        if content[HAS_BIASES] and biases is not None and biases.bias_LE is None:
            biases.use_biases(self._state.model, _empty_biases(self._state))
        for tensor, copy in self._pairs(slot):
            tensor.copy_(copy)
        restore_counters(self._state, content)

    def _start(self, slot: int) -> int:
        return slot_start(slot, self.slot_bytes)

    def _pairs(self, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every tensor of the state, and its copy in a slot."""
        offset = self._start(slot) + COUNTER_BYTES
        for _, tensor in _list_tensors(self._state):
            if tensor.numel():
                copy = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                yield tensor, copy.view(tensor.shape)
            offset += align(tensor.nbytes, TENSOR_ALIGNMENT)


def restore_counters(state: CheckpointedState, content: dict[str, Any]) -> None:
    """Set counters and loss scale to those of a snapshot."""
    for name, value in content["counters"].items():
        setattr(state.counters, name, value)
    state.counters.first_step = state.counters.step
    state.loss_scaler.load_state_dict(content["loss_scale"])


def _list_tensors(state: CheckpointedState) -> list[tuple[str, Tensor]]:
    """The tensors that change in training, in an order that every generation repeats.

    ``layout.snapshot_tensors`` lists the same without torch.
    """
    named = list(state.sharded.named_parameters())
    weights = state.sharded.local_parameters()
    tensors = [(name, weight.detach()) for (name, _), weight in zip(named, weights, strict=True)]
    for name, parameter in named:
        kept = state.optimizer.state.get(parameter, {})
        tensors += [(f"{name}:{key}", kept[key]) for key in sorted(kept) if isinstance(kept[key], Tensor)]
    if state.plan.job.mixes_samples:
        tensors += list(state.model.named_buffers())
    if state.expert_biases is not None:
        biases = state.expert_biases.bias_LE
        tensors.append((SELECTION_BIAS, _empty_biases(state) if biases is None else biases))
    return tensors


def _empty_biases(state: CheckpointedState) -> Tensor:
    """Placeholder for selection biases of a run without any: a checkpoint loaded later may have some."""
    shape = selection_bias_shape(state.plan.job.model)
    assert shape is not None, "the model has experts"
    return torch.zeros(shape)
