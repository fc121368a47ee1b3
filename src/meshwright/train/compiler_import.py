"""Avoids the import of torch's compiler in ranks that compile nothing.

Torch imports ``torch._dynamo``, which takes as long as torch itself, only to exclude functions from
compilation: some optimizer methods and dispatch modes at their first call, and every optimizer step. A rank
that compiles nothing does not need that. This relies on two private details of torch 2.11 to 2.13. A version
without them imports the compiler as before, and ``tests/unit/train/test_train_compiler_import.py`` says so.
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
"""Methods that torch excludes from compilation at their first call."""
DISABLE_ATTRIBUTE = "__dynamo_disable"
"""Attribute in which the wrapper of such a method caches the excluded function."""


def skip_compiler_import() -> None:
    """Keep this process from importing ``torch._dynamo`` during training; results do not change.

    Only for a process that never compiles: the excluded methods are no longer excluded.
    """
    for method in DISABLED_METHODS:
        if (plain := _unwrapped(method)) is not None:
            vars(plain).setdefault(DISABLE_ATTRIBUTE, plain)
    for rule in (AdamW, SGD):
        if (plain := _unwrapped(rule.step)) is not None and not _is_built(rule):
            rule.step = torch.no_grad()(plain)  # type: ignore[method-assign]  # the rest of what the wrapper did


def _is_built(rule: type[Optimizer]) -> bool:
    """Whether an optimizer of this class exists already. Torch has then wrapped its step again, for hooks."""
    return getattr(rule.step, "hooked", False)


def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function inside torch's wrapper, if there is one."""
    return getattr(method, "__wrapped__", None)
