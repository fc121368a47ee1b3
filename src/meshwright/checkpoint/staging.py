"""The tensors that this rank writes into a checkpoint, and their copy in staging memory.

The chunks are those of ``layout.state_chunks``: views of the rank's local tensors, without any communication.
Rank 0 also writes the tensors that are equal on all ranks: running statistics of batch norms, and the biases
of expert selection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import TensorFacts
from meshwright.checkpoint.state import CheckpointedState
from meshwright.checkpoint.tensor_files import DTYPES, WriteItem
from meshwright.layout.state_chunks import (
    SELECTION_BIAS,
    TensorSlice,
    list_full_tensors,
    staging_bytes,
    written_chunks,
)


@torch.no_grad()
def list_write_items(state: CheckpointedState, rank: int) -> list[WriteItem]:
    """The chunks that this rank writes, as views of the live state."""
    job = state.plan.job
    shapes = list_full_tensors(job)
    named = dict(state.sharded.named_parameters())
    items = []
    for chunk in written_chunks(job, rank):
        name, _, key = chunk.tensor.partition(":")
        parameter = named[name]
        tensor = state.optimizer.state[parameter][key] if key else parameter.detach()
        values = tensor[chunk.first : chunk.first + chunk.rows] if tensor.ndim else tensor
        items.append(WriteItem(chunk.tensor, chunk.tensor_slice, shapes[chunk.tensor], values))
    if rank == 0:
        for name, tensor in list_extra_tensors(state).items():
            shape = tuple(tensor.shape)
            items.append(WriteItem(name, TensorSlice.full(shape), shape, tensor))
    return items


def list_extra_tensors(state: CheckpointedState) -> dict[str, Tensor]:
    """Tensors that are neither parameters nor optimizer state, and equal on all ranks."""
    extra: dict[str, Tensor] = {}
    if state.plan.job.mixes_samples:  # running statistics of batch norms
        extra |= dict(state.model.named_buffers())
    if state.expert_biases is not None and state.expert_biases.bias_LE is not None:
        extra[SELECTION_BIAS] = state.expert_biases.bias_LE
    return extra


def describe_tensors(state: CheckpointedState) -> dict[str, TensorFacts]:
    """All full tensors of the checkpoint."""
    full = {name: TensorFacts("F32", shape) for name, shape in list_full_tensors(state.plan.job).items()}
    extra = list_extra_tensors(state).items()
    return full | {name: TensorFacts(DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in extra}


class StagingBuffer:
    """Memory for one copy of the write items: a checkpoint is written from it while training goes on.

    It is allocated once. On a GPU it is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            device: Device of the state.
        """
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self._memory.nbytes

    def reserve(self, items: list[WriteItem]) -> None:
        """Allocate the memory for items of these sizes, and touch it."""
        size = staging_bytes(item.values.nbytes for item in items)
        if self.bytes < size:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)

    @torch.no_grad()
    def copy(self, items: list[WriteItem]) -> list[WriteItem]:
        """Copy the items; returns when the copy is complete."""
        self.reserve(items)
        copies, offset = [], 0
        for item in items:
            size = item.values.nbytes
            flat = self._memory[offset : offset + size].view(item.values.dtype)
            copy = flat.view(item.values.shape)
            copy.copy_(item.values, non_blocking=self._pinned)
            copies.append(item._replace(values=copy))
            offset += staging_bytes([size])
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return copies
