"""Hooks on every module that pass the inputs and outputs of selected samples to a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.models.moe import ExpertLinear, Experts
from meshwright.models.routing import Router
from meshwright.parallel.context import gather_full_sequence
from meshwright.parallel.full_tensors import canonical_name, full_tensor
from meshwright.parallel.tensor import gather_full_activation
from meshwright.train.batches import split_into_micro_batches
from meshwright.train.trainer import Trainer
from meshwright.verify.proof_task import PROOF_PHASE

ActivationCallback = Callable[[str, str, int, Tensor], None]
"""Called with the module, `input` or `output`, the position of a sample in the batch, and its tensor."""


class ActivationHooks:
    """Active between ``begin`` and ``end`` of a forward pass; sharded activations are gathered."""

    def __init__(self, trainer: Trainer, positions: Sequence[int], on_activation: ActivationCallback) -> None:
        batches = trainer.data.train
        self._tp, self._cp, self._counter = trainer.parallel.tp, trainer.parallel.cp, trainer.counter
        samples = np.arange(trainer.job.train.global_batch)
        self._micro_batches = list(
            split_into_micro_batches(samples, batches.rank, batches.ranks, batches.micro_batch)
        )
        self._rows = batches.micro_batch
        self._positions = set(positions)
        self._on_activation = on_activation
        self._micro_batch = -1
        self._seen: set[tuple[str, str]] = set()
        self._active = False
        self._handles: list[RemovableHandle] = []
        for name, module in trainer.model.named_modules():
            if not isinstance(module, Router | Experts | ExpertLinear):  # their rows are not samples
                self._register(canonical_name(name), module)

    def begin(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self._micro_batch = micro_batch
        self._seen = set()
        self._active = micro_batch < len(self._micro_batches)

    def end(self) -> None:
        """The forward pass has ended; recomputation in the backward pass is ignored."""
        self._active = False

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _register(self, name: str, module: nn.Module) -> None:
        # Before all other hooks: hooks of the layout that change the input are part of the module.
        before = module.register_forward_pre_hook(
            lambda _, inputs: self._observe(name, "input", inputs), prepend=True
        )
        after = module.register_forward_hook(lambda _, inputs, output: self._observe(name, "output", output))
        self._handles += [before, after]

    def _observe(self, name: str, what: str, value: Any) -> None:
        if not self._active or (name, what) in self._seen:  # only the first call of a module
            return
        self._seen.add((name, what))
        tensor = _first_tensor(value)
        if tensor is not None and tensor.ndim:
            with self._counter.during(PROOF_PHASE):
                self._pass_on(name, what, self._gather(name, what, tensor))

    def _gather(self, name: str, what: str, tensor: Tensor) -> Tensor:
        full = full_tensor(tensor)
        if self._tp is not None:
            full = gather_full_activation(self._tp, name, what, full)
        return full if self._cp is None else gather_full_sequence(self._cp, name, what, full)

    def _pass_on(self, name: str, what: str, tensor: Tensor) -> None:
        shared = len(tensor) != self._rows  # positional embeddings are looked up once for all samples
        for row, position in enumerate(self._micro_batches[self._micro_batch]):
            if int(position) in self._positions:
                self._on_activation(name, what, int(position), tensor if shared else tensor[row])


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple | list):
        return next((part for part in value if isinstance(part, Tensor)), None)
    return None
