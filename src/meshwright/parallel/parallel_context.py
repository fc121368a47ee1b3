"""This rank's context, tensor and expert parallelism: all axes inside data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import EXPERT_AXIS
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.ring_attention import RingContextParallel
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.parallel.ulysses import UlyssesContextParallel
from meshwright.spec.job import Job

CONTEXT_METHODS: dict[str, type[ContextParallel]] = {
    "ring": RingContextParallel,
    "ulysses": UlyssesContextParallel,
}
"""By ``layout.context``."""


@dataclass(frozen=True)
class ParallelContext:
    """The groups that share sequences, dense weights and experts, and this rank's shards."""

    mesh: Mesh
    cp: ContextParallel | None
    """The positions of this rank; None without context parallelism."""
    tp: TensorParallel | None
    """The ``tp`` group; None without tensor parallelism."""
    local_shards: LocalShards | None
    """The tp and ep shard of each parameter; None if parameters are full."""

    @classmethod
    def build(cls, job: Job, mesh: Mesh) -> ParallelContext:
        """Build the context of this rank. All ranks call it together."""
        cp = CONTEXT_METHODS[job.layout.context](job, mesh) if job.layout.cp > 1 else None
        tp = TensorParallel(job, mesh) if job.layout.tp > 1 else None
        shards = tp is not None or EXPERT_AXIS in mesh.groups
        return cls(mesh, cp, tp, LocalShards(job, mesh, tp) if shards else None)
