"""What of each parameter a rank updates and keeps optimizer state for: all of it, or a chunk of its rows.

The optimizer, the gradient norm, checkpoints and the audit ask here and need not know the layout:

``Owned``         everything: one process and replicas.
``OwnedRows``     a chunk of rows of a parameter that is whole on every rank (ZeRO-1). Gradients are whole
                  and the same on all ranks; after the update the chunks are gathered.
``OwnedShards``   a chunk of rows of a parameter that FSDP2 keeps cut (ZeRO-2 and 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.plan.sharding import chunk_rows
from meshwright.run.mesh import Ranks

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class Owned:
    """All of every parameter."""

    cut_up = False
    """Whether other ranks own the rest."""

    def __init__(self, module: nn.Module, keep_gradients: bool = False) -> None:
        """Own a module.

        Args:
            module: The model.
            keep_gradients: Clear gradients to zero and do not drop them: they are views of DDP's buckets.
        """
        self.module = module
        self._keep_gradients = keep_gradients

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is updated, by the parameter's name."""
        yield from self.module.named_parameters()

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that are owned."""
        return whole

    def gather(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor of what each rank owns."""
        return own

    def whole_parameter(self, name: str) -> Tensor:
        """The whole of a parameter."""
        return self.gather(name, dict(self.named_parameters())[name].detach())

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter."""
        return self.module.get_parameter(name).shape

    def held(self) -> list[Tensor]:
        """Parameters as they lie in this rank's memory between steps."""
        return list(self.module.parameters())

    def held_gradients(self) -> list[Tensor]:
        """Gradients as they lie there."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def take_gradients(self) -> None:
        """After the backward pass: what is owned gets its gradient."""

    def norm(self) -> Tensor:
        """Norm of the whole gradient."""
        return nn.utils.get_total_norm([p.grad for _, p in self.named_parameters() if p.grad is not None])

    def publish(self) -> None:
        """After the update: every rank gets what the others have updated."""

    def drop_gradients(self) -> None:
        """After the update: gradients begin again."""
        gradients = [p for p in self.module.parameters() if p.grad is not None]
        if self._keep_gradients:
            torch._foreach_zero_([cast(Tensor, p.grad) for p in gradients])
            return
        for parameter in gradients:
            parameter.grad = None

    def end_evaluation(self) -> None:
        """What an evaluation gathered is let go."""


class _Chunks(Owned):
    """Rows of every parameter, cut over ``dp_shard``."""

    cut_up = True

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module)
        self._ranks = ranks
        self._group = ranks.group("dp_shard")
        self._shards, self._index = self._group.size(), self._group.rank()
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self._own: dict[str, nn.Parameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rows, by the parameter's name."""
        yield from self._own.items()

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter."""
        return self._shapes[name]

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """The rows of a whole tensor that are owned."""
        rows = chunk_rows(len(whole), self._shards, self._index)
        return whole[rows.start : rows.stop]

    @torch.no_grad()
    def gather(self, name: str, own: Tensor) -> Tensor:
        """Every rank sends its rows, filled up to the longest chunk, and gets all of them."""
        own = own.to(self._ranks.device)  # from the host, where it is offloaded
        shape = self._shapes[name]
        size = -(-shape[0] // self._shards)
        padded = own.new_zeros(size, *shape[1:])
        padded[: len(own)] = own
        whole = own.new_empty(size * self._shards, *shape[1:])
        _all_gather(whole, padded, group=self._group)
        return whole[: shape[0]]

    def norm(self) -> Tensor:
        """Every rank sends the squared norm of its rows; replicas send the same, which is divided out."""
        squares = [torch.linalg.vector_norm(p.grad).double().square() for p in self._own.values()]
        total = torch.stack(squares).sum().to(self._ranks.device)
        dist.all_reduce(total, group=self._ranks.control)
        return (total * (self._shards / self._ranks.world_size)).sqrt().float()


class OwnedRows(_Chunks):
    """ZeRO-1: views of whole parameters."""

    def __init__(self, module: nn.Module, ranks: Ranks, buckets: Sequence[Sequence[str]]) -> None:
        """Own rows.

        Args:
            module: The model, whole.
            ranks: All of them.
            buckets: Names of parameters that are gathered in one call after the update.
        """
        super().__init__(module, ranks)
        self._buckets = buckets
        self._whole = dict(module.named_parameters())
        self._own = {name: nn.Parameter(self.cut(name, p.detach())) for name, p in self._whole.items()}

    def whole_parameter(self, name: str) -> Tensor:
        """It is whole already."""
        return self._whole[name].detach()

    def take_gradients(self) -> None:
        """Rows get the rows of the gradient."""
        for name, own in self._own.items():
            gradient = self._whole[name].grad
            own.grad = None if gradient is None else self.cut(name, gradient)

    @torch.no_grad()
    def publish(self) -> None:
        """Every rank sends its rows of a bucket's parameters and gets the others'."""
        for names in self._buckets:
            parts, sizes = [], []
            for name in names:
                shape = self._shapes[name]
                row = shape.numel() // shape[0]
                sizes.append(-(-shape[0] // self._shards) * row)
                flat = self._own[name].detach().reshape(-1)
                parts += [flat, flat.new_zeros(sizes[-1] - flat.numel())]
            sent = torch.cat(parts)
            del parts
            everything = sent.new_empty(self._shards * sent.numel())
            _all_gather(everything, sent, group=self._group)
            columns = everything.view(self._shards, -1).split(sizes, dim=1)
            for name, column in zip(names, columns, strict=True):
                whole = self._whole[name].detach().view(-1)
                whole.copy_(column.reshape(-1)[: whole.numel()])

    def drop_gradients(self) -> None:
        """Gradients begin again."""
        for own in self._own.values():
            own.grad = None
        torch._foreach_zero_([p.grad for p in self._whole.values() if p.grad is not None])


class OwnedShards(_Chunks):
    """ZeRO-2 and 3: the local part of FSDP2's parameters."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module, ranks)
        self._cut = {name: cast(DTensor, p) for name, p in module.named_parameters()}
        self._own = {name: nn.Parameter(_local(p)) for name, p in self._cut.items()}

    def held(self) -> list[Tensor]:
        """The shards."""
        return list(self._own.values())

    def held_gradients(self) -> list[Tensor]:
        """Their gradients, views of what reduce-scatters gave."""
        return [_local(p.grad) for p in self._cut.values() if p.grad is not None]

    def take_gradients(self) -> None:
        """Rows get the rows of the gradient."""
        for name, own in self._own.items():
            gradient = self._cut[name].grad
            own.grad = None if gradient is None else _local(gradient)

    def drop_gradients(self) -> None:
        """Gradients begin again."""
        for name, own in self._own.items():
            own.grad = self._cut[name].grad = None

    def end_evaluation(self) -> None:
        """Let go of what an evaluation gathered."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    assert isinstance(local, Tensor), "a shard that is not on this rank"
    return local
