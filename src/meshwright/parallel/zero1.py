"""ZeRO-1: full parameters and gradients on every rank, the optimizer state sharded by rows.

Megatron calls it the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.rank_parameters import RowShardedParameters, list_all_reduced
from meshwright.spec.job import Job


class Zero1Parameters(RowShardedParameters):
    """Views of the rows that this rank updates. After the optimizer step the parameters are all-gathered."""

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        mesh: Mesh,
        buckets: Sequence[Sequence[str]],
        local_shards: LocalShards | None = None,
    ) -> None:
        """Take views of the rows.

        Args:
            module: The model, with full rows.
            job: Its layout says over which ranks rows are sharded.
            mesh: This rank's groups.
            buckets: Parameter names that one all-gather sends after the optimizer step.
            local_shards: The tp and ep shard of each parameter.
        """
        super().__init__(module, job, mesh, local_shards)
        self._keep_gradients = list_all_reduced(job, self._shapes)
        self._buckets = buckets
        self._parameters = dict(module.named_parameters())
        self._row_shards = {
            name: nn.Parameter(self._shard_rows(name, p.detach())) for name, p in self._parameters.items()
        }

    def assign_shard_grads(self) -> None:
        """Set the gradients of the row shards: views of the full gradients."""
        for name, row_shard in self._row_shards.items():
            gradient = self._parameters[name].grad
            row_shard.grad = None if gradient is None else self._shard_rows(name, gradient)

    @torch.no_grad()
    def all_gather_parameters(self) -> None:
        """Bucket by bucket: every rank sends its updated rows, padded, and gets the rows of all ranks."""
        for names in self._buckets:
            shards = self._shards(names[0])
            if shards == 1:  # experts without replicas
                continue
            parts, sizes = [], []
            for name in names:
                shape = self._shapes[name]
                row = shape.numel() // shape[0]
                sizes.append(-(-shape[0] // shards) * row)
                flat = self._row_shards[name].detach().reshape(-1)
                parts += [flat, flat.new_zeros(sizes[-1] - flat.numel())]
            sent = torch.cat(parts)
            del parts
            gathered = sent.new_empty(shards * sent.numel())
            all_gather_into(gathered, sent, group=self._group(names[0]))
            columns = gathered.view(shards, -1).split(sizes, dim=1)
            for name, column in zip(names, columns, strict=True):
                parameter = self._parameters[name].detach().view(-1)
                parameter.copy_(column.reshape(-1)[: parameter.numel()])

    def zero_grads(self) -> None:
        """Drop the gradients of the row shards and of the full parameters."""
        for row_shard in self._row_shards.values():
            row_shard.grad = None
        super().zero_grads()
