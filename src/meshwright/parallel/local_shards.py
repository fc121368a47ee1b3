"""The shard of each full parameter on this rank, before data parallelism shards its rows.

Dense parameters are sharded over ``tp`` (``tensor_collectives``), routed experts over ``ep``: a rank holds
some experts and, with ``etp``, some columns of the inner width of each. Initial weights, checkpoints and
proofs use this interface for both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout.axes import EXPERT_AXIS, is_expert
from meshwright.layout.parameters import list_parameters
from meshwright.layout.state_chunks import expert_dim, local_rows, row_chunks
from meshwright.parallel.collectives import all_gather_rows
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class ExpertShards:
    """This rank's experts, and its columns of them.

    The rows of one expert are contiguous: (experts, rows of one, columns).
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "only decoders have experts"
        group = mesh.group(EXPERT_AXIS)
        self.size, self._name = group.size(), group.group_name
        self._experts, self._ep, self._etp = job.model.num_experts or 0, job.layout.ep, job.layout.etp
        self._etp_rank = group.rank() % self._etp

    def num_shards(self, name: str) -> int:
        """How many shards a parameter has."""
        return self._ep if expert_dim(name) is None else self.size

    @torch.no_grad()
    def all_gather(self, name: str, local_tensor: Tensor) -> Tensor:
        """Every rank sends its shard and gets the full tensor."""
        if self.num_shards(name) == 1:  # a bias that all ranks hold
            return local_tensor
        parts = all_gather_rows(local_tensor, self.size, self._name).unflatten(0, (self._ep, self._etp, -1))
        dim = expert_dim(name)
        if dim is None:
            return parts[:, self._etp_rank].flatten(0, 1)
        by_expert = parts.unflatten(2, (self._experts // self._ep, -1))  # ep, etp, experts, rows, columns
        return by_expert.movedim(1, dim + 1).flatten(dim + 1, dim + 2).flatten(0, 2)


class LocalShards:
    """This rank's shards of dense parameters and of experts."""

    def __init__(self, job: Job, mesh: Mesh, tp: TensorParallel | None) -> None:
        """Find the shards of a rank.

        Args:
            job: The settled job.
            mesh: This rank's groups.
            tp: Shards dense parameters; None if they are full.
        """
        self.tp = tp
        self._job, self._rank = job, mesh.rank
        self._experts = ExpertShards(job, mesh) if EXPERT_AXIS in mesh.groups else None
        self._shapes = {p.name: p.shape for p in list_parameters(job.model)}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a full parameter."""
        return self._shapes[name]

    def num_shards(self, name: str) -> int:
        """How many different shards a parameter has."""
        if is_expert(name):
            return 1 if self._experts is None else self._experts.num_shards(name)
        return 1 if self.tp is None else self.tp.size // self.tp.replicas_of(name)

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This rank's shard of a parameter or of a tensor of its shape. Replicated ones stay as they are.

        A vocabulary that does not divide is padded with zeros.
        """
        if self.num_shards(name) == 1:
            return full
        return self.shard_rows(name, range(self.num_rows(name)), lambda first, last: full[first:last])

    def num_rows(self, name: str) -> int:
        """Rows of this rank's shard, padding included."""
        shape = self._shapes[name]
        return shape[0] if self.num_shards(name) == 1 else local_rows(self._job, self._rank, name, shape)

    def shard_rows(self, name: str, rows: range, full_rows: Callable[[int, int], Tensor]) -> Tensor:
        """Some rows of this rank's shard.

        Args:
            name: The parameter.
            rows: Which rows of the shard.
            full_rows: Gives rows of the full tensor, from the first to before the last.
        """
        if self.num_shards(name) == 1:
            return full_rows(rows.start, rows.stop)
        parts, shape = [], self._shapes[name]
        for chunk in row_chunks(self._job, self._rank, name, shape, rows):
            first, *columns = chunk.tensor_slice.index
            parts.append(full_rows(first.start, first.stop)[(slice(None), *columns)])
        missing = len(rows) - sum(len(part) for part in parts)
        if missing or not parts:
            some = parts[0] if parts else full_rows(0, 0)
            parts.append(some.new_zeros(missing, *some.shape[1:]))
        return torch.cat(parts)

    def all_gather(self, name: str, local_tensor: Tensor) -> Tensor:
        """The full tensor of which each rank has a shard. All ranks of the group call it."""
        if is_expert(name):
            return local_tensor if self._experts is None else self._experts.all_gather(name, local_tensor)
        return local_tensor if self.tp is None else self.tp.all_gather(name, local_tensor)
