"""A rank's place among those that share each matrix: the collectives over ``tp``, and who holds what.

They are torch's functional collectives, which its compiler and its fake tensors understand. Sequence
parallelism cuts the tokens of the whole micro-batch into equal runs, not those of each sample: what is
gathered then lies in order, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from meshwright.layout.parameters import list_parameters
from meshwright.layout.tensor_parallel import (
    KV_REPLICA_AXIS,
    count_kv_replicas,
    is_kv_projection,
    is_tp_replicated,
    needs_tp_grad_sync,
)
from meshwright.models.decoder_sharding import style_of
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

_functional = torch.ops._c10d_functional


def _all_reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    """Every rank sends a tensor and gets the sum."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), operation, group))


def all_gather_rows(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank sends its rows and gets all rows."""
    return _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), size, group))


def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Every rank sends all rows and gets the sum of its own."""
    return _functional.wait_tensor(_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


class _Sum(torch.autograd.Function):
    """Forward: the sum. Backward: nothing, as every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumGradient(torch.autograd.Function):
    """Forward: nothing, as every rank has the whole input. Backward: the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Forward: all ranks' rows. Backward: the sum, each rank's own rows of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.place = (size, group)
        return all_gather_rows(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, *ctx.place), None, None


class _Scatter(torch.autograd.Function):
    """Forward: the sum, each rank's own rows of it. Backward: all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.place = (size, group)
        return _reduce_scatter(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_rows(grad, *ctx.place), None, None


class TensorParallel:
    """A rank's place among those that share each matrix, and what of each parameter it holds."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
        self._mesh = mesh
        group = mesh.group("tp")
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name
        self.sequence = job.layout.sequence_parallel
        self.copies = count_kv_replicas(job.model, self.size)
        self.words = job.model.vocab_size
        self.batch = (job.layout.micro_batch or 1, job.data.seq_len // job.layout.cp)
        """Samples and tokens a sample of the micro-batch that is in work."""
        self._shapes = {p.name: p.shape for p in list_parameters(job.model)}

    def prepare_input(self, x: Tensor) -> Tensor:
        """To (B, T, D) on every rank, from what the residual stream holds."""
        if not self.sequence:
            return _SumGradient.apply(x, self.name)
        return _Gather.apply(x, self.size, self.name).view(*self.batch, -1)

    def reduce_output(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, as the residual stream holds it."""
        if not self.sequence:
            return _Sum.apply(part, self.name)
        return _Scatter.apply(part.flatten(0, 1), self.size, self.name)

    def local_tokens(self, index: Tensor) -> Tensor:
        """Of one number a token, those of the tokens that the rank holds between the blocks."""
        if not self.sequence:
            return index
        return index.expand(self.batch).flatten().chunk(self.size)[self.rank]

    def all_gather_columns(self, x: Tensor, copies: int = 1) -> Tensor:
        """All ranks' columns of what a split product gave; of copies a rank takes its own."""
        parts = all_gather_rows(x, self.size, self.name).chunk(self.size)
        return torch.cat(parts[self.rank % copies :: copies], dim=-1)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """All ranks' tokens of what the residual stream holds, by sample."""
        return all_gather_rows(x, self.size, self.name).unflatten(0, self.batch) if self.sequence else x

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, outside the backward pass."""
        return _all_reduce(x, self.name)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest over the ranks."""
        return _all_reduce(x, self.name, "max")

    def replicas_of(self, name: str) -> int:
        """How many ranks hold the same elements of a parameter."""
        if is_tp_replicated(name):
            return self.size
        return self.copies if is_kv_projection(name) else 1

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """The rank's part of a parameter, or of what has its shape, in memory of its own.

        Words are filled up with zeros.
        """
        if is_tp_replicated(name):
            return whole
        dim, copies = self._dim(name), self.replicas_of(name)
        pieces, index = self.size // copies, self.rank // copies
        everything = self._shapes[name][dim]
        length = -(-everything // pieces)
        own = slice(min(index * length, everything), min((index + 1) * length, everything))
        part = whole[own] if dim == 0 else whole[:, own]  # of a mapped file no more is read
        missing = length - part.shape[dim]
        return F.pad(part, (0, 0) * (part.ndim - 1 - dim) + (0, missing)) if missing else part.clone()

    @torch.no_grad()
    def all_gather(self, name: str, own: Tensor) -> Tensor:
        """The whole of what each rank holds a part of: every rank sends its part and gets all of them.

        Of copies a rank takes its own, so that copies which disagree are seen.
        """
        if is_tp_replicated(name):
            return own
        copies = self.replicas_of(name)
        parts = all_gather_rows(own, self.size, self.name).chunk(self.size)[self.rank % copies :: copies]
        dim = self._dim(name)
        return torch.cat(parts, dim).narrow(dim, 0, self._shapes[name][dim])

    def _dim(self, name: str) -> int:
        owner, _, leaf = name.rpartition(".")
        return 1 if style_of(owner) == "row" and leaf == "weight" else 0

    @torch.no_grad()
    def all_reduce_grads(self, gradients: dict[str, Tensor | None], counts: dict[str, int]) -> None:
        """Add up, in place, what each rank has a part of: one call for copies of keys, one for whole tensors.

        Args:
            gradients: By parameter, as this rank holds them.
            counts: Elements that the fullest rank holds of each.
        """
        summed = [name for name in gradients if needs_tp_grad_sync(name, self.sequence)]
        copied = [name for name in gradients if self.copies > 1 and is_kv_projection(name)]
        for names, axis in ((summed, "tp"), (copied, KV_REPLICA_AXIS)):
            found = [(g, counts[name]) for name in names if (g := gradients[name]) is not None]
            if found:
                self._sum(found, self._mesh.group(axis))

    def _sum(self, gradients: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> None:
        filled = [F.pad(g.flatten(), (0, count - g.numel())) for g, count in gradients]
        flat = torch.cat(filled).to(self._mesh.device)  # from the host, where gradients are offloaded
        dist.all_reduce(flat, group=group)
        for (gradient, _), summed in zip(gradients, flat.split([len(f) for f in filled]), strict=True):
            gradient.copy_(summed[: gradient.numel()].view_as(gradient))
