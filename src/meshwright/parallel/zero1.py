"""What of each parameter a rank updates and keeps optimizer state for: all of it, or a chunk of its rows.

The optimizer, the gradient norm, checkpoints and the audit ask here and need not know the layout:

``Owned``         everything: one process and replicas.
``Zero1State``     a chunk of rows of a parameter that is whole on every rank (ZeRO-1). Gradients are whole
                  and the same on all ranks; after the update the chunks are gathered.
``FsdpState``   a chunk of rows of a parameter that FSDP2 keeps cut (ZeRO-2 and 3).

Where matrices are split or experts dealt, a parameter is the rank's piece of it, to each of them: ``cut`` and
``gather`` go through the ``Pieces`` as well, and the norm counts what lies on several ranks once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.layout.axes import gradient_axis, state_axis
from meshwright.layout.fsdp_groups import chunk_rows
from meshwright.layout.stages import TIED_AXIS, TIED_NAME
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


def list_all_reduced(job: Job, names: Iterable[str]) -> frozenset[str]:
    """Of parameters those whose whole gradients are summed with other ranks', in buckets."""
    return frozenset(name for name in names if gradient_axis(job, name).size > 1)


class ShardedState:
    """All of every parameter that the rank holds."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh | None = None,
        local_shards: LocalShards | None = None,
        keep_gradients: Collection[str] = (),
    ) -> None:
        """Own a module.

        Args:
            module: The model.
            mesh: All of them; none for one process.
            local_shards: Which piece of each parameter the module has; None if it has all.
            keep_gradients: Parameters whose gradients are cleared to zero and not dropped: views of buckets.
        """
        self.module, self._mesh, self._local_shards = module, mesh, local_shards
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self._keep_gradients = keep_gradients
        self._has_tied_replica = mesh is not None and TIED_AXIS in mesh.groups
        """Whether another rank has a copy of the embedding."""
        self.is_sharded = local_shards is not None or (mesh is not None and mesh.pp > 1)
        """Whether other ranks own the rest."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is updated, by the parameter's name."""
        yield from self.module.named_parameters()

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """What is owned of a whole tensor."""
        return self._shard_rows(name, self._local_part(name, whole))

    def shard_to(self, name: str, whole: Any, shape: torch.Size) -> Tensor:
        """The part of a whole tensor that has a shape: of the matrix, or of its rows alone.

        Args:
            name: The parameter.
            whole: Its values, or a tensor of a mapped file, of which no more is read than is wanted.
            shape: What is wanted of it, less than the whole.
        """
        part = self._local_part(name, whole)
        if isinstance(part, Tensor) and part.shape == shape:
            return part
        return self._shard_rows(name, part)

    def full_tensor(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor of what each rank owns."""
        if self._mesh is not None:
            own = own.to(self._mesh.device)  # from the host, where it is offloaded
        return self.unshard(name, self._all_gather_rows(name, own))

    def unshard(self, name: str, held: Tensor) -> Tensor:
        """The whole of a tensor of which the rank holds its piece."""
        return held if self._local_shards is None else self._local_shards.all_gather(name, held)

    def full_parameter(self, name: str) -> Tensor:
        """The whole of a parameter."""
        return self.full_tensor(name, dict(self.named_parameters())[name].detach())

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self._shapes[name]) if self._local_shards is None else self._local_shards.shape(name)

    def _local_part(self, name: str, whole: Any) -> Any:
        return whole if self._local_shards is None else self._local_shards.shard(name, whole)

    def _shard_rows(self, name: str, held: Tensor) -> Tensor:
        """The rows that are owned."""
        return held

    def _all_gather_rows(self, name: str, own: Tensor) -> Tensor:
        """All rows."""
        return own

    def local_parameters(self) -> list[Tensor]:
        """Parameters as they lie in this rank's memory between steps."""
        return list(self.module.parameters())

    def local_grads(self) -> list[Tensor]:
        """Gradients as they lie there."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def finalize_grads(self) -> None:
        """After the backward pass: ranks that share matrices add up what each has a part of."""
        if self._local_shards is not None and self._local_shards.tp is not None:
            counts = {name: s.numel() // s[0] * self._rows(name) for name, s in self._shapes.items()}
            self._local_shards.tp.all_reduce_grads(self._gradients(), counts)
        if self._has_tied_replica:
            self._all_reduce_tied_embedding()

    @torch.no_grad()
    def _all_reduce_tied_embedding(self) -> None:
        """The first and the last stage's part of a tied embedding's gradient become their sum on both."""
        assert self._mesh is not None, "a pipeline has ranks"
        own = self._gradients()[TIED_NAME]
        assert own is not None, "a tied embedding without gradient"
        filled, device = own, self._mesh.device
        if len(own) < self._rows(TIED_NAME) or own.device != device:  # a short shard, or one on the host
            filled = torch.zeros(self._rows(TIED_NAME), *own.shape[1:], device=device)
            filled[: len(own)] = own
        dist.all_reduce(filled, group=self._mesh.group(TIED_AXIS))
        if filled is not own:
            own.copy_(filled[: len(own)])

    def _gradients(self) -> dict[str, Tensor | None]:
        """As they lie in memory, by parameter."""
        return {name: p.grad for name, p in self.module.named_parameters()}

    def _rows(self, name: str) -> int:
        """Rows of a gradient on the fullest rank."""
        return self._shapes[name][0]

    def _shards(self, name: str) -> int:
        """Ranks over which the rows of a parameter are cut."""
        return 1

    def assign_shard_grads(self) -> None:
        """After that: what is owned gets its gradient."""

    def grad_norm(self) -> Tensor:
        """Norm of the whole gradient."""
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        if self.is_sharded:
            return self._global_norm(gradients)
        wide = [gradient for gradient in gradients.values() if gradient.dtype == torch.float32]
        narrow = [gradient for gradient in gradients.values() if gradient.dtype != torch.float32]
        norm = nn.utils.get_total_norm(wide)
        if not narrow:
            return norm
        norms = torch._foreach_norm(narrow, 2.0, dtype=torch.float32)  # else each is rounded as they are
        return torch.linalg.vector_norm(torch.stack([norm, *norms]))

    def _global_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Every rank sends the squared norm of what it owns; what others own too is divided by how many."""
        assert self._mesh is not None, "nothing is cut in one process"
        world, local_shards = self._mesh.world_size // self._mesh.pp, self._local_shards
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        by_owners: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            distinct = self._shards(name) * (1 if local_shards is None else local_shards.num_shards(name))
            copies = 2 if self._has_tied_replica and name == TIED_NAME else 1
            by_owners.setdefault(copies * world // distinct, []).append(torch.linalg.vector_norm(gradient))
        for owners, norms in by_owners.items():
            total += torch.stack(norms).double().square().sum().to(total.device) / owners
        dist.all_reduce(total, group=self._mesh.control)
        return total.sqrt().float()

    def all_gather_parameters(self) -> None:
        """After the update: every rank gets what the others have updated."""

    def zero_grads(self) -> None:
        """After the update: gradients begin again."""
        kept = []
        for name, parameter in self.module.named_parameters():
            if name not in self._keep_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)

    def list_all_gather_outputs(self) -> Iterator[Tensor]:
        """What other ranks' parts of the parameters are gathered into; empty where nothing is."""
        return iter(())

    def reshard_after_eval(self) -> None:
        """What an evaluation gathered is let go."""


class _RowShardedState(ShardedState):
    """Rows of every parameter, cut over ranks of data; those of experts may be others than the rest's."""

    def __init__(
        self, module: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None = None
    ) -> None:
        super().__init__(module, mesh, local_shards)
        self.is_sharded = True
        self._axes = {name: state_axis(job, name) for name in self._shapes}
        self._own: dict[str, nn.Parameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rows, by the parameter's name."""
        yield from self._own.items()

    def _shards(self, name: str) -> int:
        """Ranks over which the rows of a parameter are cut."""
        return self._axes[name].size

    def _group(self, name: str) -> dist.ProcessGroup:
        assert self._mesh is not None, "nothing is cut in one process"
        return self._mesh.group(self._axes[name].name)

    def _shard_rows(self, name: str, held: Tensor) -> Tensor:
        """The rows that are owned."""
        shards = self._shards(name)
        if shards == 1:
            return held
        rows = chunk_rows(self._shapes[name][0], shards, self._group(name).rank())
        return held[rows.start : rows.stop]

    @torch.no_grad()
    def _all_gather_rows(self, name: str, own: Tensor) -> Tensor:
        """Every rank sends its rows, filled up to the longest chunk, and gets all of them."""
        shape, shards = self._shapes[name], self._shards(name)
        if shards == 1:
            return own
        size = -(-shape[0] // shards)
        padded = own.new_zeros(size, *shape[1:])
        padded[: len(own)] = own
        whole = own.new_empty(size * shards, *shape[1:])
        _all_gather(whole, padded, group=self._group(name))
        return whole[: shape[0]]


class Zero1State(_RowShardedState):
    """ZeRO-1: views of whole parameters."""

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        mesh: Mesh,
        buckets: Sequence[Sequence[str]],
        local_shards: LocalShards | None = None,
    ) -> None:
        """Own rows.

        Args:
            module: The model, whole.
            job: Whose layout says over which ranks.
            mesh: All of them.
            buckets: Names of parameters that are gathered in one call after the update.
            local_shards: Which piece of each parameter the module has.
        """
        super().__init__(module, job, mesh, local_shards)
        self._keep_gradients = list_all_reduced(job, self._shapes)
        self._buckets = buckets
        self._whole = dict(module.named_parameters())
        self._own = {
            name: nn.Parameter(self._shard_rows(name, p.detach())) for name, p in self._whole.items()
        }

    def full_parameter(self, name: str) -> Tensor:
        """Its rows are all here already."""
        return self.unshard(name, self._whole[name].detach())

    def assign_shard_grads(self) -> None:
        """Rows get the rows of the gradient."""
        for name, own in self._own.items():
            gradient = self._whole[name].grad
            own.grad = None if gradient is None else self._shard_rows(name, gradient)

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        """Every rank sends its rows of a bucket's parameters and gets the others'."""
        for names in self._buckets:
            shards = self._shards(names[0])
            if shards == 1:  # experts of which every rank has others
                continue
            parts, sizes = [], []
            for name in names:
                shape = self._shapes[name]
                row = shape.numel() // shape[0]
                sizes.append(-(-shape[0] // shards) * row)
                flat = self._own[name].detach().reshape(-1)
                parts += [flat, flat.new_zeros(sizes[-1] - flat.numel())]
            sent = torch.cat(parts)
            del parts
            everything = sent.new_empty(shards * sent.numel())
            _all_gather(everything, sent, group=self._group(names[0]))
            columns = everything.view(shards, -1).split(sizes, dim=1)
            for name, column in zip(names, columns, strict=True):
                whole = self._whole[name].detach().view(-1)
                whole.copy_(column.reshape(-1)[: whole.numel()])

    def zero_grads(self) -> None:
        """Gradients begin again."""
        for own in self._own.values():
            own.grad = None
        super().zero_grads()


class FsdpState(_RowShardedState):
    """ZeRO-2 and 3: the local part of FSDP2's parameters."""

    def __init__(
        self, module: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None = None
    ) -> None:
        super().__init__(module, job, mesh, local_shards)
        self._cut = {name: cast("DTensor", p) for name, p in module.named_parameters()}
        self._own = {name: nn.Parameter(_local(p)) for name, p in self._cut.items()}

    def local_parameters(self) -> list[Tensor]:
        """The shards."""
        return list(self._own.values())

    def local_grads(self) -> list[Tensor]:
        """Their gradients, views of what reduce-scatters gave."""
        return [gradient for gradient in self._gradients().values() if gradient is not None]

    def _gradients(self) -> dict[str, Tensor | None]:
        """As they lie in memory, by parameter."""
        return {name: None if p.grad is None else _local(p.grad) for name, p in self._cut.items()}

    def _rows(self, name: str) -> int:
        """Rows of a gradient on the fullest rank."""
        return -(-self._shapes[name][0] // self._shards(name))

    def assign_shard_grads(self) -> None:
        """Rows get the rows of the gradient."""
        gradients = self._gradients()
        for name, own in self._own.items():
            own.grad = gradients[name]

    def zero_grads(self) -> None:
        """Gradients begin again."""
        for name, own in self._own.items():
            own.grad = self._cut[name].grad = None

    def list_all_gather_outputs(self) -> Iterator[Tensor]:
        """What FSDP2 gathers into, by names that 2.11 and 2.13 have."""
        for part in self.module.modules():
            if is_sharded(part) and (group := part._get_fsdp_state()._fsdp_param_group):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs

    def reshard_after_eval(self) -> None:
        """Let go of what an evaluation gathered."""
        for part in self.module.modules():
            if is_sharded(part):
                part.reshard()


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    assert isinstance(local, Tensor), "a shard that is not on this rank"
    return local
