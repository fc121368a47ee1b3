"""Full parameters and gradients under the names of the one-process model, whatever the layout.

Importing DTensor and FSDP2 loads sympy and takes a third of the time of torch's own import. Only layouts that
shard parameters import them (``parallel.fsdp``). Until then nothing can be an instance.
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
"""Parts of a dotted name that wrappers add."""


def canonical_name(name: str) -> str:
    """The name that a module or parameter has in the one-process model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_dtensor(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor: its full value needs the other ranks."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def is_sharded(module: object) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 shards a module's parameters."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, detached.

    Every rank of a DTensor's mesh sends its shard and gets all shards: they must call this together. Of a
    replicated dim the rank's own replica is taken, so that replicas which differ are seen.
    """
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, by its name in the one-process model."""
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter
