"""The parameters of one rank, and its optimizer shard: the part of each parameter that it updates.

The optimizer, the gradient norm, checkpoints and the audit use this interface and do not look at the layout:

``RankParameters``   updates all rows of every local parameter: one process, or replicas (DDP);
``Zero1Parameters``  updates a chunk of rows; the parameter is full on every rank (``zero1``);
``FsdpParameters``   updates a chunk of rows; FSDP2 shards the parameter (``fsdp``).

With tensor or expert parallelism a local parameter is already a shard (``local_shards``). ``shard`` and
``full_tensor`` go through both levels. The gradient norm counts a replicated element once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.layout.axes import gradient_axis, state_axis
from meshwright.layout.fsdp_groups import chunk_rows
from meshwright.layout.stages import TIED_AXIS, TIED_NAME
from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job


def list_all_reduced(job: Job, names: Iterable[str]) -> frozenset[str]:
    """The parameters whose full gradients are all-reduced in buckets."""
    return frozenset(name for name in names if gradient_axis(job, name).size > 1)


class RankParameters:
    """Base class: this rank updates all rows of every local parameter."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh | None = None,
        local_shards: LocalShards | None = None,
        keep_gradients: Collection[str] = (),
    ) -> None:
        """Take the parameters of a module.

        Args:
            module: The model.
            mesh: None for one process.
            local_shards: The tp and ep shard of each parameter; None if parameters are full.
            keep_gradients: Parameters whose gradients are views of buckets: set to zero, not dropped.
        """
        self.module, self._mesh, self._local_shards = module, mesh, local_shards
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self._keep_gradients = keep_gradients
        self._has_tied_replica = mesh is not None and TIED_AXIS in mesh.groups
        """Whether the tied embedding is on another pp rank, too."""
        self.is_sharded = local_shards is not None or (mesh is not None and mesh.pp > 1)
        """Whether this rank has only a part of the state."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer updates, by name."""
        yield from self.module.named_parameters()

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's optimizer shard of a full tensor."""
        return self._shard_rows(name, self._shard_local(name, full))

    def full_tensor(self, name: str, local_tensor: Tensor) -> Tensor:
        """All-gather the full tensor from the optimizer shards. All ranks call it together."""
        if self._mesh is not None:
            local_tensor = local_tensor.to(self._mesh.device)  # from CPU memory, where it is offloaded
        return self.unshard(name, self._gather_rows(name, local_tensor))

    def unshard(self, name: str, local: Tensor) -> Tensor:
        """All-gather the full tensor from the tp or ep shards. All ranks call it together."""
        return local if self._local_shards is None else self._local_shards.all_gather(name, local)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return tuple(self._shapes[name]) if self._local_shards is None else self._local_shards.shape(name)

    def _shard_local(self, name: str, full: Any) -> Any:
        """The tp or ep shard."""
        return full if self._local_shards is None else self._local_shards.shard(name, full)

    def _shard_rows(self, name: str, local: Tensor) -> Tensor:
        """The rows in the optimizer shard."""
        return local

    def _gather_rows(self, name: str, local_tensor: Tensor) -> Tensor:
        """All rows of a local parameter, from the optimizer shards."""
        return local_tensor

    def local_parameters(self) -> list[Tensor]:
        """The parameters in this rank's memory between steps."""
        return list(self.module.parameters())

    def local_grads(self) -> list[Tensor]:
        """The gradients in this rank's memory."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def finalize_grads(self) -> None:
        """All-reduce, after the backward pass, gradients that data parallelism does not complete.

        Over ``tp``: replicated parameters, of which each rank has a part of the sum. Between the first and
        the last pp rank: a tied embedding.
        """
        if self._local_shards is not None and self._local_shards.tp is not None:
            counts = {name: s.numel() // s[0] * self._max_rows(name) for name, s in self._shapes.items()}
            self._local_shards.tp.all_reduce_grads(self._gradients(), counts)
        if self._has_tied_replica:
            self._all_reduce_tied_embedding()

    @torch.no_grad()
    def _all_reduce_tied_embedding(self) -> None:
        """First and last stage send their gradient of the tied embedding. Both get the sum."""
        assert self._mesh is not None, "a pipeline has ranks"
        local_tensor = self._gradients()[TIED_NAME]
        assert local_tensor is not None, "a tied embedding without gradient"
        padded, device, rows = local_tensor, self._mesh.device, self._max_rows(TIED_NAME)
        if len(local_tensor) < rows or local_tensor.device != device:  # a short shard, or one in CPU memory
            padded = torch.zeros(rows, *local_tensor.shape[1:], device=device)
            padded[: len(local_tensor)] = local_tensor
        dist.all_reduce(padded, group=self._mesh.group(TIED_AXIS))
        if padded is not local_tensor:
            local_tensor.copy_(padded[: len(local_tensor)])

    def _gradients(self) -> dict[str, Tensor | None]:
        """The gradients in memory, by parameter."""
        return {name: p.grad for name, p in self.module.named_parameters()}

    def _max_rows(self, name: str) -> int:
        """Rows of a gradient on the rank that has the most."""
        return self._shapes[name][0]

    def _shards(self, name: str) -> int:
        """Ranks over which the rows of a local parameter are sharded."""
        return 1

    def assign_shard_grads(self) -> None:
        """Give the optimizer shards their gradients, before the optimizer step."""

    def grad_norm(self) -> Tensor:
        """Norm of the whole model's gradient."""
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        if self.is_sharded:
            return self._global_norm(gradients)
        wide = [gradient for gradient in gradients.values() if gradient.dtype == torch.float32]
        narrow = [gradient for gradient in gradients.values() if gradient.dtype != torch.float32]
        norm = nn.utils.get_total_norm(wide)
        if not narrow:
            return norm
        norms = torch._foreach_norm(narrow, 2.0, dtype=torch.float32)  # else each norm is rounded to 16 bits
        return torch.linalg.vector_norm(torch.stack([norm, *norms]))

    def _global_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Every rank sends the squared norm of its shards, divided by their replicas, and gets the sum."""
        assert self._mesh is not None, "one process shards nothing"
        world, local_shards = self._mesh.world_size // self._mesh.pp, self._local_shards
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        by_replicas: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            distinct = self._shards(name) * (1 if local_shards is None else local_shards.num_shards(name))
            tied = 2 if self._has_tied_replica and name == TIED_NAME else 1
            by_replicas.setdefault(tied * world // distinct, []).append(torch.linalg.vector_norm(gradient))
        for replicas, norms in by_replicas.items():
            total += torch.stack(norms).double().square().sum().to(total.device) / replicas
        dist.all_reduce(total, group=self._mesh.control)
        return total.sqrt().float()

    def all_gather_parameters(self) -> None:
        """Make the parameters full again after the optimizer step, where a forward pass expects it."""

    def zero_grads(self) -> None:
        """Drop the gradients after the optimizer step. Views of buckets are set to zero instead."""
        kept = []
        for name, parameter in self.module.named_parameters():
            if name not in self._keep_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)

    def list_all_gather_outputs(self) -> Iterator[Tensor]:
        """The tensors that parameters are gathered into for a forward or backward pass."""
        return iter(())

    def reshard_after_eval(self) -> None:
        """Free what an evaluation gathered."""


class RowShardedParameters(RankParameters):
    """This rank updates a chunk of rows of every parameter.

    Experts may be sharded over other ranks than dense parameters.
    """

    def __init__(
        self, module: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None = None
    ) -> None:
        super().__init__(module, mesh, local_shards)
        self.is_sharded = True
        self._axes = {name: state_axis(job, name) for name in self._shapes}
        self._row_shards: dict[str, nn.Parameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The chunks of rows, by the parameter's name."""
        yield from self._row_shards.items()

    def _shards(self, name: str) -> int:
        return self._axes[name].size

    def _group(self, name: str) -> dist.ProcessGroup:
        assert self._mesh is not None, "one process shards nothing"
        return self._mesh.group(self._axes[name].name)

    def _shard_rows(self, name: str, local: Tensor) -> Tensor:
        shards = self._shards(name)
        if shards == 1:
            return local
        rows = chunk_rows(self._shapes[name][0], shards, self._group(name).rank())
        return local[rows.start : rows.stop]

    @torch.no_grad()
    def _gather_rows(self, name: str, local_tensor: Tensor) -> Tensor:
        """All-gather: every rank sends its rows, padded to the longest chunk, and gets all rows."""
        shape, shards = self._shapes[name], self._shards(name)
        if shards == 1:
            return local_tensor
        size = -(-shape[0] // shards)
        padded = local_tensor.new_zeros(size, *shape[1:])
        padded[: len(local_tensor)] = local_tensor
        full = local_tensor.new_empty(size * shards, *shape[1:])
        all_gather_into(full, padded, group=self._group(name))
        return full[: shape[0]]
