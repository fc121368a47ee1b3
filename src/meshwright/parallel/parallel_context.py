"""What a rank has of the model and of its samples, before data parallelism: the inner axes, together."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import EXPERTS
from meshwright.parallel.context import SharedContext, find_context
from meshwright.parallel.local_shards import Pieces
from meshwright.parallel.mesh import Ranks
from meshwright.parallel.tensor_collectives import Split
from meshwright.spec.job import Job


@dataclass(frozen=True)
class Seat:
    """A rank's place on the axes that share a sequence, a matrix, or the experts of a layer."""

    ranks: Ranks
    context: SharedContext | None
    """Which positions it has; None for all."""
    split: Split | None
    """Which part of each dense matrix it has; None for all."""
    pieces: Pieces | None
    """Which piece of each parameter it has, of experts too; None for all of every parameter."""

    @classmethod
    def of(cls, job: Job, ranks: Ranks) -> Seat:
        """The rank's; all ranks ask together."""
        context = find_context(job, ranks)
        split = Split(job, ranks) if job.layout.tp > 1 else None
        cut_up = split is not None or EXPERTS in ranks.groups
        return cls(ranks, context, split, Pieces(job, ranks, split) if cut_up else None)
