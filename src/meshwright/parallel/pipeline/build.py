"""Builds the pipeline of a rank from its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from meshwright.layout.ddp_buckets import stage_buckets
from meshwright.layout.pipeline_schedules import schedule_of
from meshwright.layout.stages import local_stages
from meshwright.models.decoder import Stages
from meshwright.models.linear import deferrable_parameters
from meshwright.parallel.bucket_reducer import BucketReducer, find_bucket_groups
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.stages import Stage
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def build_pipeline(
    model: Stages, job: Job, micro_batches: int, mesh: Mesh, precision: MixedPrecision
) -> Pipeline:
    """The stages of this rank, with data parallelism applied, on their schedule."""
    stages, sharded = {}, job.layout.zero >= 2
    split_backward = schedule_of(job, micro_batches).split_backward
    specs, buckets = local_stages(job, mesh.pp_rank), stage_buckets(job, mesh.pp_rank)
    first = next(iter(model))
    for decoder, spec, names in zip(model, specs, buckets, strict=True):
        groups, reducer = find_bucket_groups(job, mesh, names), None
        if groups and not sharded:
            deferred = deferrable_parameters(decoder) if split_backward else ()
            reducer = BucketReducer(decoder, groups, job.compression.kind, deferred)
        embedding = cast("FSDPModule", first) if spec.shares_embedding and sharded else None
        stages[spec.stage] = Stage.build(
            decoder, reducer, embedding, split_backward, compiled=not uses_eager_blocks(job)
        )
    return Pipeline(stages, job, micro_batches, mesh, precision)
