"""Which piece of each whole parameter a rank holds, before data parallelism cuts its rows.

Dense matrices are sharded over ``tp`` (``run.parallel.tp``), routed experts over ``ep``: a rank has some of
them, and with ``etp`` some columns of the inner width of each. Initial weights, checkpoints and proofs ask
here, and need not know which.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout.axes import EXPERT_AXIS, is_expert
from meshwright.layout.parameters import list_parameters
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor_collectives import TensorParallel, all_gather_rows
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class ExpertShards:
    """A rank's experts, and its columns of them.

    Of a parameter's rows, those of one expert lie together: (experts, rows of one, columns).
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        assert isinstance(job.model, DecoderModel), "only decoders have experts"
        group = mesh.group(EXPERT_AXIS)
        self.size, self._name = group.size(), group.group_name
        self._experts, self._ep, self._etp = job.model.num_experts or 0, job.layout.ep, job.layout.etp
        self.index, self.inner = divmod(group.rank(), self._etp)
        """Its place among the ranks of whole experts, and among those that share each."""

    def num_shards(self, name: str) -> int:
        """How many pieces a parameter has."""
        return self._ep if self._dim(name) is None else self.size

    def shard(self, name: str, whole: Any) -> Tensor:
        """The rank's piece of a parameter, or of what has its shape, in memory of its own."""
        rows = (whole.shape if isinstance(whole, Tensor) else whole.get_shape())[0] // self._ep
        mine = whole[self.index * rows : (self.index + 1) * rows]
        dim = self._dim(name)
        if dim is None or self._etp == 1:
            return mine.clone()
        by_expert = mine.unflatten(0, (self._experts // self._ep, -1))
        return by_expert.chunk(self._etp, dim)[self.inner].flatten(0, 1).clone()

    @torch.no_grad()
    def all_gather(self, name: str, own: Tensor) -> Tensor:
        """The whole of what each rank holds a piece of: every rank sends its own and gets all of them."""
        if self.num_shards(name) == 1:  # a bias that all hold
            return own
        parts = all_gather_rows(own, self.size, self._name).unflatten(0, (self._ep, self._etp, -1))
        dim = self._dim(name)
        if dim is None:
            return parts[:, self.inner].flatten(0, 1)
        by_expert = parts.unflatten(2, (self._experts // self._ep, -1))  # ep, etp, experts, rows, columns
        return by_expert.movedim(1, dim + 1).flatten(dim + 1, dim + 2).flatten(0, 2)

    @staticmethod
    def _dim(name: str) -> int | None:
        """The dim of (experts, rows, columns) along which one expert is tp; None where it is not."""
        *_, module, leaf = name.split(".")
        if module != "down":
            return 1
        return 2 if leaf == "weight" else None


class LocalShards:
    """All of it: of dense matrices and of experts."""

    def __init__(self, job: Job, mesh: Mesh, tp: TensorParallel | None) -> None:
        """Know what the rank holds.

        Args:
            job: The settled job.
            mesh: This rank's place.
            tp: Its place among the ranks that share each dense matrix; None if it has all.
        """
        self.tp = tp
        self._experts = ExpertShards(job, mesh) if EXPERT_AXIS in mesh.groups else None
        self._shapes = {p.name: p.shape for p in list_parameters(job.model)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole parameter."""
        return self._shapes[name]

    def num_shards(self, name: str) -> int:
        """How many different pieces there are of a parameter."""
        if is_expert(name):
            return 1 if self._experts is None else self._experts.num_shards(name)
        return 1 if self.tp is None else self.tp.size // self.tp.replicas_of(name)

    def shard(self, name: str, whole: Any) -> Any:
        """The rank's piece of a parameter, or of what has its shape; the whole itself if it has all."""
        if is_expert(name):
            return whole if self._experts is None else self._experts.shard(name, whole)
        return whole if self.tp is None else self.tp.shard(name, whole)

    def all_gather(self, name: str, own: Tensor) -> Tensor:
        """The whole of what each rank holds a piece of; all of them call it."""
        if is_expert(name):
            return own if self._experts is None else self._experts.all_gather(name, own)
        return own if self.tp is None else self.tp.all_gather(name, own)
