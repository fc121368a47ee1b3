"""Parameters and gradients whole and under one name, however a layout holds them.

Torch's DTensor and FSDP2 bring sympy with them, and a third of the time of torch's own import. Only layouts
that cut parameters load them (``run.parallel.sharded``); until then nothing can be an instance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a dotted name that only a wrapper has put there."""


def canonical_name(name: str) -> str:
    """The name that a module or parameter has in the one-process model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_dtensor(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether making it whole needs the other ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_sharded(module: object) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 has cut a module's parameters."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached.

    Of a DTensor every rank of its mesh sends its shard and gets all of them: they must call this together. A
    dim that is replicated is taken as this rank has it, so that ranks which disagree are seen.
    """
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, by the name that the one-process model has for it."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter
