"""The tensors of a checkpoint: names and shapes at once, values one tensor at a time.

A sharded tensor is all-gathered when the writer asks for it. So no rank holds more than one full tensor,
however large the state is. All ranks must go through the same tensors in the same order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from meshwright.checkpoint.divergence import non_finite_error
from meshwright.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, SELECTION_BIAS
from meshwright.checkpoint.state import CheckpointedState
from meshwright.core.tensor_header import TensorInfo
from meshwright.layout.optimizer_state import STEP_COUNT, rule_of, state_keys
from meshwright.layout.stages import locate_parameters

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""Names of dtypes in safetensors files."""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    full: Callable[[], Tensor]
    """Returns the full tensor; a collective where it is sharded."""

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """A tensor that this rank holds in full."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def facts(self) -> TensorInfo:
        """Its entry in the file header."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return TensorInfo(DTYPES[self.dtype], self.shape, size)


class CheckpointTensors:
    """The tensors of all files of a checkpoint, each produced once."""

    def __init__(self, files: Mapping[str, Mapping[str, SavedTensor]]) -> None:
        """Order the tensors; none is produced yet.

        Args:
            files: The tensors of each file, by name.
        """
        # Wide elements first, then by name: every element is aligned, and the bytes are safetensors' own.
        self._files = {
            file: dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
            for file, tensors in files.items()
        }
        self._values = (saved.full() for tensors in self._files.values() for saved in tensors.values())

    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        """The header of each file, in order."""
        return {
            file: {name: saved.facts for name, saved in tensors.items()}
            for file, tensors in self._files.items()
        }

    def values(self) -> Iterator[Tensor]:
        """The tensors of all files, from the first that was not produced yet."""
        return self._values

    def drain(self) -> None:
        """Take part in the remaining gathers and keep nothing: the other ranks wait in each of them."""
        deque(self._values, maxlen=0)


def list_checkpoint_tensors(
    state: CheckpointedState, has_checkpoint: Callable[[], bool]
) -> CheckpointTensors:
    """The parameters, optimizer state and buffers of the current step; a tied head is saved once.

    Producing a weight that is not finite raises: it must not replace a good checkpoint.

    Args:
        state: Of this rank.
        has_checkpoint: Whether there is an older checkpoint; only called for the error message.
    """
    sharded, job = state.sharded, state.plan.job
    named = dict(sharded.named_parameters())
    model: dict[str, SavedTensor] = {}
    optimizer: dict[str, SavedTensor] = {}
    for parameter, holder in locate_parameters(job):
        name, shape = parameter.name, parameter.shape
        saved = partial(_gathered, state, holder)
        model[name] = saved(shape, partial(sharded.full_parameter, name))
        for key in state_keys(rule_of(name, len(shape), job.train), job.train):
            local_tensor = state.optimizer.state[named[name]][key] if name in named else torch.empty(0)
            if key == STEP_COUNT:
                optimizer[f"{name}:{key}"] = saved((), partial(torch.clone, local_tensor))
            else:
                optimizer[f"{name}:{key}"] = saved(shape, partial(sharded.full_tensor, name, local_tensor))
    if job.mixes_samples:  # running statistics of batch norms
        model |= {name: SavedTensor.of(buffer) for name, buffer in state.model.named_buffers()}
    if state.expert_biases is not None and state.expert_biases.bias_LE is not None:
        model[SELECTION_BIAS] = SavedTensor.of(state.expert_biases.bias_LE)

    def require_finite(name: str, produce: Callable[[], Tensor]) -> Tensor:
        full = produce()
        if not bool(torch.isfinite(full).all()):
            raise non_finite_error(f"weight {name}", math.nan, state.counters.step, has_checkpoint())
        return full

    model = {name: replace(s, full=partial(require_finite, name, s.full)) for name, s in model.items()}
    return CheckpointTensors({MODEL_FILE: model, OPTIMIZER_FILE: optimizer})


def _gathered(
    state: CheckpointedState, holder: int, shape: tuple[int, ...], produce: Callable[[], Tensor]
) -> SavedTensor:
    """A tensor of one pipeline rank, on pipeline rank 0, which writes the checkpoint."""
    return SavedTensor(
        torch.float32, shape, partial(state.gather_to_first_stage, holder, shape, torch.float32, produce)
    )
