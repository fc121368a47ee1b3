"""What of each parameter a rank updates and keeps optimizer state for: all of it, or a chunk of its rows.

The optimizer, the gradient norm, checkpoints and the audit ask here and need not know the layout:

``Owned``         everything: one process and replicas.
``OwnedRows``     a chunk of rows of a parameter that is whole on every rank (ZeRO-1). Gradients are whole
                  and the same on all ranks; after the update the chunks are gathered.
``OwnedShards``   a chunk of rows of a parameter that FSDP2 keeps cut (ZeRO-2 and 3).

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
from meshwright.parallel.full_tensors import is_cut
from meshwright.parallel.local_shards import Pieces
from meshwright.parallel.mesh import Ranks
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


def list_summed(job: Job, names: Iterable[str]) -> frozenset[str]:
    """Of parameters those whose whole gradients are summed with other ranks', in buckets."""
    return frozenset(name for name in names if gradient_axis(job, name).size > 1)


class Owned:
    """All of every parameter that the rank holds."""

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        pieces: Pieces | None = None,
        keep_gradients: Collection[str] = (),
    ) -> None:
        """Own a module.

        Args:
            module: The model.
            ranks: All of them; none for one process.
            pieces: Which piece of each parameter the module has; None if it has all.
            keep_gradients: Parameters whose gradients are cleared to zero and not dropped: views of buckets.
        """
        self.module, self._ranks, self._pieces = module, ranks, pieces
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self._keep_gradients = keep_gradients
        self._tied = ranks is not None and TIED_AXIS in ranks.groups
        """Whether another rank has a copy of the embedding."""
        self.cut_up = pieces is not None or (ranks is not None and ranks.pp > 1)
        """Whether other ranks own the rest."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is updated, by the parameter's name."""
        yield from self.module.named_parameters()

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What is owned of a whole tensor."""
        return self._cut_rows(name, self._piece(name, whole))

    def fit(self, name: str, whole: Any, shape: torch.Size) -> Tensor:
        """The part of a whole tensor that has a shape: of the matrix, or of its rows alone.

        Args:
            name: The parameter.
            whole: Its values, or a tensor of a mapped file, of which no more is read than is wanted.
            shape: What is wanted of it, less than the whole.
        """
        part = self._piece(name, whole)
        if isinstance(part, Tensor) and part.shape == shape:
            return part
        return self._cut_rows(name, part)

    def gather(self, name: str, own: Tensor) -> Tensor:
        """The whole tensor of what each rank owns."""
        if self._ranks is not None:
            own = own.to(self._ranks.device)  # from the host, where it is offloaded
        return self.join(name, self._gather_rows(name, own))

    def join(self, name: str, held: Tensor) -> Tensor:
        """The whole of a tensor of which the rank holds its piece."""
        return held if self._pieces is None else self._pieces.join(name, held)

    def whole_parameter(self, name: str) -> Tensor:
        """The whole of a parameter."""
        return self.gather(name, dict(self.named_parameters())[name].detach())

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self._shapes[name]) if self._pieces is None else self._pieces.shape(name)

    def _piece(self, name: str, whole: Any) -> Any:
        return whole if self._pieces is None else self._pieces.cut(name, whole)

    def _cut_rows(self, name: str, held: Tensor) -> Tensor:
        """The rows that are owned."""
        return held

    def _gather_rows(self, name: str, own: Tensor) -> Tensor:
        """All rows."""
        return own

    def held(self) -> list[Tensor]:
        """Parameters as they lie in this rank's memory between steps."""
        return list(self.module.parameters())

    def held_gradients(self) -> list[Tensor]:
        """Gradients as they lie there."""
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def complete_gradients(self) -> None:
        """After the backward pass: ranks that share matrices add up what each has a part of."""
        if self._pieces is not None and self._pieces.split is not None:
            counts = {name: s.numel() // s[0] * self._rows(name) for name, s in self._shapes.items()}
            self._pieces.split.sum_gradients(self._gradients(), counts)
        if self._tied:
            self._add_tied()

    @torch.no_grad()
    def _add_tied(self) -> None:
        """The first and the last stage's part of a tied embedding's gradient become their sum on both."""
        assert self._ranks is not None, "a pipeline has ranks"
        own = self._gradients()[TIED_NAME]
        assert own is not None, "a tied embedding without gradient"
        filled, device = own, self._ranks.device
        if len(own) < self._rows(TIED_NAME) or own.device != device:  # a short shard, or one on the host
            filled = torch.zeros(self._rows(TIED_NAME), *own.shape[1:], device=device)
            filled[: len(own)] = own
        dist.all_reduce(filled, group=self._ranks.group(TIED_AXIS))
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

    def take_gradients(self) -> None:
        """After that: what is owned gets its gradient."""

    def norm(self) -> Tensor:
        """Norm of the whole gradient."""
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        if self.cut_up:
            return self._shared_norm(gradients)
        wide = [gradient for gradient in gradients.values() if gradient.dtype == torch.float32]
        narrow = [gradient for gradient in gradients.values() if gradient.dtype != torch.float32]
        norm = nn.utils.get_total_norm(wide)
        if not narrow:
            return norm
        norms = torch._foreach_norm(narrow, 2.0, dtype=torch.float32)  # else each is rounded as they are
        return torch.linalg.vector_norm(torch.stack([norm, *norms]))

    def _shared_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Every rank sends the squared norm of what it owns; what others own too is divided by how many."""
        assert self._ranks is not None, "nothing is cut in one process"
        world, pieces = self._ranks.world_size // self._ranks.pp, self._pieces
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        by_owners: dict[int, list[Tensor]] = {}
        for name, gradient in gradients.items():
            distinct = self._shards(name) * (1 if pieces is None else pieces.count(name))
            copies = 2 if self._tied and name == TIED_NAME else 1
            by_owners.setdefault(copies * world // distinct, []).append(torch.linalg.vector_norm(gradient))
        for owners, norms in by_owners.items():
            total += torch.stack(norms).double().square().sum().to(total.device) / owners
        dist.all_reduce(total, group=self._ranks.control)
        return total.sqrt().float()

    def publish(self) -> None:
        """After the update: every rank gets what the others have updated."""

    def drop_gradients(self) -> None:
        """After the update: gradients begin again."""
        kept = []
        for name, parameter in self.module.named_parameters():
            if name not in self._keep_gradients:
                parameter.grad = None
            elif parameter.grad is not None:
                kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)

    def list_gathered(self) -> Iterator[Tensor]:
        """What other ranks' parts of the parameters are gathered into; empty where nothing is."""
        return iter(())

    def end_evaluation(self) -> None:
        """What an evaluation gathered is let go."""


class _Chunks(Owned):
    """Rows of every parameter, cut over ranks of data; those of experts may be others than the rest's."""

    def __init__(self, module: nn.Module, job: Job, ranks: Ranks, pieces: Pieces | None = None) -> None:
        super().__init__(module, ranks, pieces)
        self.cut_up = True
        self._axes = {name: state_axis(job, name) for name in self._shapes}
        self._own: dict[str, nn.Parameter] = {}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The rows, by the parameter's name."""
        yield from self._own.items()

    def _shards(self, name: str) -> int:
        """Ranks over which the rows of a parameter are cut."""
        return self._axes[name].size

    def _group(self, name: str) -> dist.ProcessGroup:
        assert self._ranks is not None, "nothing is cut in one process"
        return self._ranks.group(self._axes[name].name)

    def _cut_rows(self, name: str, held: Tensor) -> Tensor:
        """The rows that are owned."""
        shards = self._shards(name)
        if shards == 1:
            return held
        rows = chunk_rows(self._shapes[name][0], shards, self._group(name).rank())
        return held[rows.start : rows.stop]

    @torch.no_grad()
    def _gather_rows(self, name: str, own: Tensor) -> Tensor:
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


class OwnedRows(_Chunks):
    """ZeRO-1: views of whole parameters."""

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        ranks: Ranks,
        buckets: Sequence[Sequence[str]],
        pieces: Pieces | None = None,
    ) -> None:
        """Own rows.

        Args:
            module: The model, whole.
            job: Whose layout says over which ranks.
            ranks: All of them.
            buckets: Names of parameters that are gathered in one call after the update.
            pieces: Which piece of each parameter the module has.
        """
        super().__init__(module, job, ranks, pieces)
        self._keep_gradients = list_summed(job, self._shapes)
        self._buckets = buckets
        self._whole = dict(module.named_parameters())
        self._own = {name: nn.Parameter(self._cut_rows(name, p.detach())) for name, p in self._whole.items()}

    def whole_parameter(self, name: str) -> Tensor:
        """Its rows are all here already."""
        return self.join(name, self._whole[name].detach())

    def take_gradients(self) -> None:
        """Rows get the rows of the gradient."""
        for name, own in self._own.items():
            gradient = self._whole[name].grad
            own.grad = None if gradient is None else self._cut_rows(name, gradient)

    @torch.no_grad()
    def publish(self) -> None:
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

    def drop_gradients(self) -> None:
        """Gradients begin again."""
        for own in self._own.values():
            own.grad = None
        super().drop_gradients()


class OwnedShards(_Chunks):
    """ZeRO-2 and 3: the local part of FSDP2's parameters."""

    def __init__(self, module: nn.Module, job: Job, ranks: Ranks, pieces: Pieces | None = None) -> None:
        super().__init__(module, job, ranks, pieces)
        self._cut = {name: cast("DTensor", p) for name, p in module.named_parameters()}
        self._own = {name: nn.Parameter(_local(p)) for name, p in self._cut.items()}

    def held(self) -> list[Tensor]:
        """The shards."""
        return list(self._own.values())

    def held_gradients(self) -> list[Tensor]:
        """Their gradients, views of what reduce-scatters gave."""
        return [gradient for gradient in self._gradients().values() if gradient is not None]

    def _gradients(self) -> dict[str, Tensor | None]:
        """As they lie in memory, by parameter."""
        return {name: None if p.grad is None else _local(p.grad) for name, p in self._cut.items()}

    def _rows(self, name: str) -> int:
        """Rows of a gradient on the fullest rank."""
        return -(-self._shapes[name][0] // self._shards(name))

    def take_gradients(self) -> None:
        """Rows get the rows of the gradient."""
        gradients = self._gradients()
        for name, own in self._own.items():
            own.grad = gradients[name]

    def drop_gradients(self) -> None:
        """Gradients begin again."""
        for name, own in self._own.items():
            own.grad = self._cut[name].grad = None

    def list_gathered(self) -> Iterator[Tensor]:
        """What FSDP2 gathers into, by names that 2.11 and 2.13 have."""
        for part in self.module.modules():
            if is_cut(part) and (group := part._get_fsdp_state()._fsdp_param_group):
                for parameter in group.fsdp_params:
                    yield from parameter.all_gather_outputs

    def end_evaluation(self) -> None:
        """Let go of what an evaluation gathered."""
        for part in self.module.modules():
            if is_cut(part):
                part.reshard()


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    assert isinstance(local, Tensor), "a shard that is not on this rank"
    return local
