"""The state that this rank writes into a checkpoint, and its copy in staging memory.

The chunks are those of ``layout.state_chunks``: views of the rank's own tensors, without any communication.
Rank 0 also writes what is equal on all ranks: running statistics of batch norms, and the biases of expert
selection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import SELECTION_BIAS, TensorFacts
from meshwright.checkpoint.saved_tensors import DTYPES, TensorPart
from meshwright.checkpoint.state import CheckpointedState
from meshwright.layout.state_chunks import Box, list_full_tensors, owned_chunks, staging_bytes


@torch.no_grad()
def list_owned_parts(state: CheckpointedState, rank: int) -> list[TensorPart]:
    """The parts of all full tensors that this rank writes, as views of the live state."""
    job = state.plan.job
    shapes = list_full_tensors(job)
    named = dict(state.sharded.named_parameters())
    parts = []
    for chunk in owned_chunks(job, rank):
        name, _, key = chunk.tensor.partition(":")
        parameter = named[name]
        tensor = state.optimizer.state[parameter][key] if key else parameter.detach()
        values = tensor[chunk.first : chunk.first + chunk.rows] if tensor.ndim else tensor
        parts.append(TensorPart(chunk.tensor, chunk.box, shapes[chunk.tensor], values))
    if rank == 0:
        for name, tensor in list_extra_tensors(state).items():
            shape = tuple(tensor.shape)
            parts.append(TensorPart(name, Box.whole(shape), shape, tensor))
    return parts


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
    """Memory for one copy of the parts: a checkpoint is written from it while training goes on.

    It is allocated once. On a GPU it is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            device: Of the state.
        """
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self._memory.nbytes

    def reserve(self, parts: list[TensorPart]) -> None:
        """Allocate the memory for parts of these sizes, and touch it."""
        size = staging_bytes(part.values.nbytes for part in parts)
        if self.bytes < size:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._pinned)

    @torch.no_grad()
    def copy(self, parts: list[TensorPart]) -> list[TensorPart]:
        """Copy the parts; returns when the copy is complete."""
        self.reserve(parts)
        copies, offset = [], 0
        for part in parts:
            size = part.values.nbytes
            flat = self._memory[offset : offset + size].view(part.values.dtype)
            copy = flat.view(part.values.shape)
            copy.copy_(part.values, non_blocking=self._pinned)
            copies.append(part._replace(values=copy))
            offset += staging_bytes([size])
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return copies
