"""What a rank has of the model and of its samples, before data parallelism: the inner axes, together."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import EXPERT_AXIS
from meshwright.parallel.context import ContextParallel, build_context_parallel
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor_collectives import TensorParallel
from meshwright.spec.job import Job


@dataclass(frozen=True)
class ParallelContext:
    """A rank's place on the axes that share a sequence, a matrix, or the experts of a layer."""

    mesh: Mesh
    context: ContextParallel | None
    """Which positions it has; None for all."""
    tp: TensorParallel | None
    """Which part of each dense matrix it has; None for all."""
    local_shards: LocalShards | None
    """Which piece of each parameter it has, of experts too; None for all of every parameter."""

    @classmethod
    def of(cls, job: Job, mesh: Mesh) -> ParallelContext:
        """The rank's; all ranks ask together."""
        context = build_context_parallel(job, mesh)
        tp = TensorParallel(job, mesh) if job.layout.tp > 1 else None
        has_local_shards = tp is not None or EXPERT_AXIS in mesh.groups
        return cls(mesh, context, tp, LocalShards(job, mesh, tp) if has_local_shards else None)
