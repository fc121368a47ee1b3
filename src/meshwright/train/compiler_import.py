"""Keeps torch's compiler out of ranks that compile nothing.

Torch imports ``torch._dynamo``, as much again as torch itself, in order to tell the compiler to leave
something alone: some methods of optimizers and what looks at every operation at their first call, and every
step of an optimizer. Where nothing is compiled there is nobody to tell. This uses two private habits of torch
2.11 to 2.13; a version without them loads its compiler as before, and
``tests/unit/train/test_train_compiler_import.py`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from meshwright.measure.memory_tracker import PeakTracker

DISABLED_METHODS = (
    Optimizer.add_param_group,
    Optimizer.load_state_dict,
    Optimizer.state_dict,
    Optimizer.zero_grad,
    PeakTracker.__torch_dispatch__,
)
"""Methods that torch hides from its compiler at their first call."""
DISABLE_ATTRIBUTE = "__dynamo_disable"
"""Where the wrapper of such a method keeps what the compiler made of it, and looks for it."""


def skip_compiler_import() -> None:
    """From now on this process does not load the compiler for a step; what it computes stays as it is.

    For a process that will never compile: what is hidden from nobody would be compiled.
    """
    for method in DISABLED_METHODS:
        if (plain := _unwrapped(method)) is not None:
            vars(plain).setdefault(DISABLE_ATTRIBUTE, plain)
    for rule in (AdamW, SGD):
        if (plain := _unwrapped(rule.step)) is not None and not _is_built(rule):
            rule.step = torch.no_grad()(plain)  # type: ignore[method-assign]  # all that the wrapper did beside


def _is_built(rule: type[Optimizer]) -> bool:
    """Whether an optimizer of the kind was built: torch then has wrapped its step once more, for hooks."""
    return getattr(rule.step, "hooked", False)


def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that torch has wrapped, if it has."""
    return getattr(method, "__wrapped__", None)
