"""The tensor-parallel group: its collectives with their gradients, and the shards of dense parameters.

The collectives are functional: torch.compile and fake tensors can trace them. Sequence parallelism
(all-gather, reduce-scatter) shards the tokens of the whole micro-batch into equal runs, not those of each
sample. Gathered tokens are then in order without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor

from meshwright.layout.parameters import list_parameters
from meshwright.layout.tensor_parallel import (
    KV_REPLICA_AXIS,
    count_kv_replicas,
    is_kv_projection,
    is_tp_replicated,
    needs_tp_grad_sync,
    tp_dim,
)
from meshwright.parallel.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class _AllReduceForward(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity, as every rank has the full gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllReduceBackward(torch.autograd.Function):
    """Forward: identity, as every rank has the full input. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _AllGather(torch.autograd.Function):
    """Forward: all-gather of rows. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.group = (size, group)
        return all_gather_rows(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_rows(grad, *ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter of rows. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.group = (size, group)
        return reduce_scatter_rows(x, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather_rows(grad, *ctx.group), None, None


class TensorParallel:
    """This rank in its ``tp`` group, and its shard of every dense parameter."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
        self._mesh = mesh
        group = mesh.group("tp")
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name
        self.sequence_parallel = job.layout.sequence_parallel
        self.kv_replicas = count_kv_replicas(job.model, self.size)
        self.vocab_size = job.model.vocab_size
        self.batch = (job.layout.micro_batch or 1, job.data.seq_len // job.layout.cp)
        """Samples of the current micro-batch, and tokens per sample."""
        self._shapes = {p.name: p.shape for p in list_parameters(job.model)}

    def prepare_input(self, x: Tensor) -> Tensor:
        """The residual stream as (B, T, D) on every rank, before column-parallel linears.

        Plain: identity, and every rank sends its part of the gradient and gets the sum. Sequence parallel:
        every rank sends its tokens and gets all tokens, and the gradient is reduce-scattered.
        """
        if not self.sequence_parallel:
            return _AllReduceBackward.apply(x, self.name)
        return _AllGather.apply(x, self.size, self.name).view(*self.batch, -1)

    def reduce_output(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' partial outputs, after a row-parallel linear.

        Plain: every rank sends its partial output and gets the sum. Sequence parallel: it gets the sum of its
        tokens.
        """
        if not self.sequence_parallel:
            return _AllReduceForward.apply(partial, self.name)
        return _ReduceScatter.apply(partial.flatten(0, 1), self.size, self.name)

    def local_tokens(self, index: Tensor) -> Tensor:
        """The values of this rank's tokens of the residual stream, from one value per token."""
        if not self.sequence_parallel:
            return index
        return index.expand(self.batch).flatten().chunk(self.size)[self.rank]

    def all_gather_columns(self, x: Tensor, replicas: int = 1) -> Tensor:
        """Every rank sends the columns that a column-parallel linear gave, and gets all columns.

        Args:
            x: This rank's columns.
            replicas: Ranks with the same columns. A rank takes those of its own replica.
        """
        parts = all_gather_rows(x, self.size, self.name).chunk(self.size)
        return torch.cat(parts[self.rank % replicas :: replicas], dim=-1)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        """Every rank sends its tokens of the residual stream and gets all tokens, by sample."""
        if not self.sequence_parallel:
            return x
        return all_gather_rows(x, self.size, self.name).unflatten(0, self.batch)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Every rank sends a tensor and gets the sum. Without a gradient."""
        return all_reduce(x, self.name)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Every rank sends a tensor and gets the elementwise maximum."""
        return all_reduce(x, self.name, "max")

    def replicas_of(self, name: str) -> int:
        """How many ranks hold the same elements of a parameter."""
        if is_tp_replicated(name):
            return self.size
        return self.kv_replicas if is_kv_projection(name) else 1

    @torch.no_grad()
    def all_gather(self, name: str, local_tensor: Tensor) -> Tensor:
        """Every rank sends its shard of a tensor and gets the full tensor.

        A rank takes the shards of its own replica, so that replicas which differ are seen.
        """
        replicas, dim = self.replicas_of(name), tp_dim(name)
        if dim is None:
            return local_tensor
        parts = all_gather_rows(local_tensor, self.size, self.name).chunk(self.size)[
            self.rank % replicas :: replicas
        ]
        return torch.cat(parts, dim).narrow(dim, 0, self._shapes[name][dim])

    @torch.no_grad()
    def all_reduce_grads(self, gradients: dict[str, Tensor | None], counts: dict[str, int]) -> None:
        """All-reduce, in place, gradients of which each rank has a part of the sum.

        One call for replicated key and value heads, over their replicas. One call for replicated parameters,
        over ``tp``. Every rank sends its gradients and gets the sums.

        Args:
            gradients: By parameter, as this rank holds them.
            counts: Elements of each on the rank that has the most.
        """
        replicated = [name for name in gradients if needs_tp_grad_sync(name, self.sequence_parallel)]
        kv = [name for name in gradients if self.kv_replicas > 1 and is_kv_projection(name)]
        for names, axis in ((replicated, "tp"), (kv, KV_REPLICA_AXIS)):
            found = [(g, counts[name]) for name in names if (g := gradients[name]) is not None]
            if found:
                self._all_reduce_flat(found, self._mesh.group(axis))

    def _all_reduce_flat(self, gradients: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> None:
        padded = [F.pad(g.flatten(), (0, count - g.numel())) for g, count in gradients]
        flat = torch.cat(padded).to(self._mesh.device)  # from CPU memory, where gradients are offloaded
        dist.all_reduce(flat, group=group)
        for (gradient, _), summed in zip(gradients, flat.split([len(p) for p in padded]), strict=True):
            gradient.copy_(summed[: gradient.numel()].view_as(gradient))
