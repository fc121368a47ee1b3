"""One rank that trains and gets a bad gradient in some steps: NaN, Inf, or a finite spike.

No signal from outside can cause that. This entry exists only for ``meshwright faults``; the entry of training
does not import it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.elastic.faults.schedule import FAULT_VARIABLE, Fault, parse_fault
from meshwright.launch.rank_process import RankLink
from meshwright.measure.step_observer import StepObserver
from meshwright.train.finite_checks import FiniteChecks
from meshwright.train.loop import train
from meshwright.train.trainer import StepHooks, Trainer
from meshwright.train.worker import run_with_trainer

FACTORS = {"nan": float("nan"), "inf": float("inf"), "spike": 2.0**20}
"""What the gradient is multiplied with."""
MODULE = "ffn.up"
"""The gradient of the first module with this name is changed."""


def run_rank(run_dir: str, link: RankLink) -> int:
    """Train as this rank, with the faults of the environment; returns the exit status."""
    faults = [parse_fault(line) for line in os.environ[FAULT_VARIABLE].splitlines()]
    return run_with_trainer(lambda trainer: _train(trainer, faults), run_dir, link)


def _train(trainer: Trainer, faults: Sequence[Fault]) -> None:
    trainer.register_hooks(BadGradients(faults))
    trainer.register_hooks(UpdateWatch())
    train(trainer)


class BadGradients(StepHooks):
    """Changes the gradient of a step, and of the recomputed step, which finds the cause."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._handles: list[RemovableHandle] = []

    def before_forward_backward(self, trainer: Trainer, observer: StepObserver | None) -> None:
        """Register the hook that changes the gradient in the fault's step; remove it in the next one."""
        if self._handles and not isinstance(observer, FiniteChecks):
            self._handles.pop().remove()
        for fault in self._faults:
            mine = (trainer.mesh.rank, trainer.step + 1) == (fault.rank, fault.step)
            if mine and not self._handles:
                self._handles.append(_spoil(trainer.model, FACTORS[fault.value or ""]))
                trainer.events.write("injected", fault=str(fault))


def _spoil(model: nn.Module, factor: float) -> RemovableHandle:
    """Change the gradient of the weight; of the input, if the weight is sharded and has no full gradient."""
    module = next(module for name, module in model.named_modules() if name.endswith(MODULE))
    is_sharded = hasattr(module.weight, "to_local")
    return (scale_input_gradient if is_sharded else scale_weight_gradient)(module, factor)


def scale_input_gradient(module: nn.Module, factor: float) -> RemovableHandle:
    """Multiply the gradient of a module's input."""

    def scale(_: nn.Module, gradients: Any, __: Any) -> Any:
        return (gradients[0] * factor, *gradients[1:])

    return module.register_full_backward_hook(scale)


def scale_weight_gradient(module: nn.Module, factor: float) -> RemovableHandle:
    """Multiply the gradient of a module's weight."""
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer"
    return weight.register_hook(lambda grad: grad * factor)


class UpdateWatch(StepHooks):
    """After an update that was skipped, writes whether this rank's state is unchanged."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def before_update(self, trainer: Trainer) -> None:
        """Copy the state."""
        self._before = [tensor.clone() for tensor in _list_state(trainer)]

    def after_update(self, trainer: Trainer, grad_norm: Tensor) -> None:
        """Compare it."""
        if not grad_norm.isfinite():
            unchanged = all(map(torch.equal, self._before, _list_state(trainer)))
            trainer.events.write("skipped_update", step=trainer.step, unchanged=unchanged)


def _list_state(trainer: Trainer) -> list[Tensor]:
    """This rank's parameters and optimizer state."""
    parameters = [parameter for _, parameter in trainer.rank_parameters.named_parameters()]
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    moments = [value for value in states if isinstance(value, Tensor)]
    found: list[Any] = [*parameters, *moments]
    return [t.detach().to_local() if hasattr(t, "to_local") else t.detach() for t in found]
