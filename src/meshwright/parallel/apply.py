"""The parallelisms in the order in which they are applied, and what a rank then owns.

Innermost first; each sees what those before it have made, and nothing of those behind it:

1. ``pp``  which blocks are here at all (``plan.parts``): the model is built with those alone;
2. ``cp``  which positions (``run.parallel.context``): rotations and masks are of these;
3. ``tp``  which part of each matrix (``run.parallel.tensor``): it changes what a product computes, so it
           comes before anything looks at whole parameters of a rank;
4. ``ep``  which experts (``run.parallel.experts``): their tokens come from ranks that 2 and 3 tell apart;
5.         what a block computes again, and the compiler, which must see the block as 2 to 4 have left it;
6. data    ``dp_replicate``, ``dp_shard`` and ``cp``: what a rank keeps of each parameter, and sums of
           gradients. They come last, as they cut and add up whatever the axes inside have produced.

1 to 4 happen when the model is built (``run.models.init``): a rank never holds what it does not keep.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

from torch import nn

from meshwright.layout.axes import dense_reduce_axis, gradient_axis, has_expert_axes, uses_ddp
from meshwright.layout.stages import list_stages, local_buckets, local_stages, schedule_of, stage_buckets
from meshwright.models.decoder import Decoder, Stages
from meshwright.models.init import WeightSource
from meshwright.models.linear import deferrable_parameters
from meshwright.parallel.bucket_reducer import BucketReducer, Buckets
from meshwright.parallel.ddp import FixedBucketDDP, apply_ddp, average_batch_norm_stats
from meshwright.parallel.fsdp import apply_fsdp, set_gradient_sync
from meshwright.parallel.full_tensors import is_sharded
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.stages import Stage
from meshwright.parallel.zero1 import FsdpState, ShardedState, Zero1State, list_all_reduced
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def apply_data_parallel(module: nn.Module, job: Job, mesh: Mesh, weights: WeightSource) -> nn.Module:
    """Spread a module over the ranks of data; one that lies nowhere yet gets its weights on the way.

    The stages of a pipeline are spread each on its own.
    """
    layout = job.layout
    if isinstance(module, Stages):
        if layout.zero >= 2:
            for stage, part in zip(module, local_stages(job, mesh.pp_rank), strict=True):
                apply_fsdp(stage, part, job, mesh, weights)
        return module
    if layout.zero >= 2:  # with dp_replicate a mesh of two axes: FSDP2 sums over both
        assert isinstance(module, Decoder), "the legality table shards decoders only"
        return apply_fsdp(module, list_stages(job)[0], job, mesh, weights)
    if uses_ddp(job):
        return apply_ddp(module, job, mesh, dense_reduce_axis(layout).name)
    return module


def build_bucket_reducer(module: nn.Module, job: Job, mesh: Mesh) -> BucketReducer | None:
    """Sums the gradients of a model where DDP cannot: experts are summed over other ranks than the rest."""
    if job.layout.zero >= 2 or not has_expert_axes(job):
        return None
    buckets = _find_groups(job, mesh, local_buckets(job, mesh.pp_rank))
    return BucketReducer(module, buckets, job.compression.kind) if buckets else None


def _find_groups(job: Job, mesh: Mesh, buckets: list[list[str]]) -> Buckets:
    """The ranks over which each bucket is summed; those that no other rank has a part of are left out."""
    axes = [gradient_axis(job, names[0]) for names in buckets]
    return [(n, mesh.group(axis.name)) for n, axis in zip(buckets, axes, strict=True) if axis.size > 1]


def build_pipeline(
    stages: Stages, job: Job, micro_batches: int, mesh: Mesh, precision: MixedPrecision
) -> Pipeline:
    """The stages of this rank, spread already, on a schedule."""
    layout, found = job.layout, {}
    split = schedule_of(job, micro_batches).split_backward
    buckets = iter(stage_buckets(job, mesh.pp_rank))
    for module, part in zip(stages, local_stages(job, mesh.pp_rank), strict=True):
        summed, reducer = _find_groups(job, mesh, next(buckets)), None
        if summed and layout.zero < 2:
            deferred = deferrable_parameters(module) if split else ()
            reducer = BucketReducer(module, summed, job.compression.kind, deferred)
        lender = (
            cast("FSDPModule", next(iter(stages))) if part.shares_embedding and layout.zero >= 2 else None
        )
        found[part.stage] = Stage.of(module, reducer, lender, split, not uses_eager_blocks(job))
    return Pipeline(found, job, micro_batches, mesh, precision)


def build_sharded_state(
    model: nn.Module, job: Job, mesh: Mesh, local_shards: LocalShards | None
) -> ShardedState:
    """What of a spread model this rank updates."""
    if job.layout.zero >= 2:
        return FsdpState(model, job, mesh, local_shards)
    if job.layout.zero == 1:
        return Zero1State(model, job, mesh, local_buckets(job, mesh.pp_rank), local_shards)
    # Summed gradients are views of buckets: dropped, the next accumulation would hold a second copy.
    summed = list_all_reduced(job, (name for name, _ in model.named_parameters()))
    return ShardedState(model, mesh, local_shards, keep_gradients=summed)


def gradient_sync(module: nn.Module, job: Job, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: those before the last one leave something for later."""
    if is_sharded(module):
        set_gradient_sync(module, job, last)
    if isinstance(module, FixedBucketDDP) and not last:
        return module.no_sync()
    return nullcontext()


def sync_batch_norm_stats(module: nn.Module, job: Job, mesh: Mesh) -> None:
    """After a step: what batch norms have seen becomes the same on all ranks; other models have nothing."""
    if job.mixes_samples and job.layout.dp_replicate > 1:
        average_batch_norm_stats(module, mesh)
