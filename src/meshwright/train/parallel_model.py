"""The model of a rank after all axes are applied, with its pipeline and gradient reduction."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.parallel.apply import Parallelized
from meshwright.parallel.backup_replicas import BackupReplicas
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.rank_parameters import RankParameters


@dataclass(frozen=True)
class ParallelModel:
    """Model, pipeline, gradient reduction and optimizer shard of a rank."""

    applied: Parallelized
    """The model with every axis applied."""
    pipeline: Pipeline | None
    """Runs the stages, with ``layout.pp > 1``."""
    reducer: BucketReducer | None
    """All-reduces gradients, where neither the module nor the pipeline does."""
    rank_parameters: RankParameters
    """The parameters that this rank updates and keeps optimizer state for."""
    backup: BackupReplicas | None
    """Reduces gradients with ``layout.backup_replicas > 0``."""
