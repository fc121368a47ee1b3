"""Data parallelism: selects the implementation of a layout, and has the functions that the trainer calls.

``ddp``: replicas. ``backup_replicas``: replicas, with backups of slow ones. ``bucket_reducer``: replicas of
pipeline stages and of experts. ``zero1``: ZeRO-1. ``fsdp``: ZeRO-2, ZeRO-3 and hybrid sharding
(HSDP).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn

from meshwright.layout.axes import dense_reduce_axis, has_expert_axes, uses_ddp
from meshwright.layout.ddp_buckets import local_buckets
from meshwright.layout.stages import local_stages
from meshwright.models.decoder import Block
from meshwright.models.weight_source import WeightSource
from meshwright.parallel.backup_replicas import BackupReplicas, FinishedSlices
from meshwright.parallel.bucket_reducer import BucketReducer, find_bucket_groups
from meshwright.parallel.build import LocalModel, list_decoders
from meshwright.parallel.ddp import FixedBucketDDP, apply_ddp
from meshwright.parallel.fsdp import FsdpParameters, apply_fsdp, set_gradient_sync
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.rank_parameters import RankParameters, list_all_reduced
from meshwright.parallel.zero1 import Zero1Parameters
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job


def apply_data_parallel(model: LocalModel, job: Job, mesh: Mesh, weights: WeightSource) -> nn.Module:
    """Shard a model with FSDP or wrap it with DDP. Pipeline stages are sharded one by one.

    Pipeline stages and models with experts are not wrapped: a :class:`BucketReducer` reduces their gradients.
    """
    if job.layout.zero >= 2:
        for decoder, stage in zip(list_decoders(model), local_stages(job, mesh.pp_rank), strict=True):
            apply_fsdp(decoder, stage, job, mesh, weights)
        return model
    return apply_ddp(model, job, mesh, dense_reduce_axis(job.layout).name) if uses_ddp(job) else model


def build_bucket_reducer(model: nn.Module, job: Job, mesh: Mesh) -> BucketReducer | None:
    """Build the reducer of a model with experts, whose gradients have another group than dense ones.

    Only for layouts without pipelines: ``pipeline.build`` builds the reducers of pipeline stages.
    """
    if job.layout.zero >= 2 or not has_expert_axes(job):
        return None
    buckets = find_bucket_groups(job, mesh, local_buckets(job, mesh.pp_rank))
    return BucketReducer(model, buckets, job.compression.kind) if buckets else None


def build_backup_replicas(
    model: nn.Module, job: Job, mesh: Mesh, store: dist.Store | None
) -> BackupReplicas | None:
    """Build the backup replicas; None without ``layout.backup_replicas``.

    Args:
        model: Model of this rank.
        job: The settled job.
        mesh: Mesh of the rank.
        store: Tells replicas which samples are done; without one none abandons its samples.
    """
    if not job.layout.backup_replicas:
        return None
    slices = job.layout.data_degree
    finished_slices = None if store is None else FinishedSlices(store, slices)
    # Hooks of compiled blocks would be compiled with them.
    blocks = [m for m in model.modules() if isinstance(m, Block)] if uses_eager_blocks(job) else []
    buckets = local_buckets(job, mesh.pp_rank)
    return BackupReplicas(
        model, buckets, mesh.group("dp_replicate"), slices, finished_slices, [model, *blocks]
    )


def build_rank_parameters(
    model: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None
) -> RankParameters:
    """The parameters of this rank, and its optimizer shard."""
    if job.layout.zero >= 2:
        return FsdpParameters(model, job, mesh, local_shards)
    if job.layout.zero == 1:
        return Zero1Parameters(model, job, mesh, local_buckets(job, mesh.pp_rank), local_shards)
    # All-reduced gradients are views of buckets: a dropped one would be allocated again beside its bucket.
    reduced = list_all_reduced(job, (name for name, _ in model.named_parameters()))
    return RankParameters(model, mesh, local_shards, keep_gradients=reduced)


def gradient_sync(module: nn.Module, job: Job, last: bool) -> AbstractContextManager[None]:
    """Context of a micro-batch of gradient accumulation: only the last one reduces all gradients."""
    if is_sharded(module):
        set_gradient_sync(module, job, last)
    if isinstance(module, FixedBucketDDP) and not last:
        return module.no_sync()
    return nullcontext()
