"""The parallelisms in the order in which they are applied, and what a rank then owns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.plan.parts import held_buckets, held_parts, list_stages, schedule_of, stage_buckets
from meshwright.plan.sharding import ALL_DATA
from meshwright.run.mesh import Ranks
from meshwright.run.models.decoder import Decoder, Stages
from meshwright.run.models.init import WeightSource
from meshwright.run.models.products import late_parameters
from meshwright.run.parallel.data import FixedBucketDDP, apply_replicate, average_statistics
from meshwright.run.parallel.ownership import Owned, OwnedRows, OwnedShards
from meshwright.run.parallel.reducer import StageReducer
from meshwright.run.parallel.sharded import apply_sharding, begin_micro_batch
from meshwright.run.parallel.split import Split
from meshwright.run.pipeline.pipeline import Pipeline
from meshwright.run.pipeline.stages import Stage
from meshwright.run.precision import Precision
from meshwright.spec.job import Job


def apply_layout(module: nn.Module, job: Job, ranks: Ranks, weights: WeightSource) -> nn.Module:
    """Spread a module over the ranks of data; one that lies nowhere yet gets its weights on the way.

    Its matrices were split over ``tp`` when it was built: innermost, before anything is cut or summed. Its
    stages were split over ``pp`` then, too: each is spread on its own.
    """
    layout = job.layout
    if isinstance(module, Stages):
        if layout.zero >= 2:
            for stage, part in zip(module, held_parts(job, ranks.place), strict=True):
                apply_sharding(stage, part, job, ranks, weights)
        return module
    if layout.zero >= 2:  # with dp_replicate a mesh of two axes: FSDP2 sums over both
        assert isinstance(module, Decoder), "the legality table shards decoders only"
        return apply_sharding(module, list_stages(job)[0], job, ranks, weights)
    if layout.data_degree > 1:  # outermost: it sums whatever gradients the axes inside produce
        return apply_replicate(module, job, ranks, _replica_axis(job))
    return module


def _replica_axis(job: Job) -> str:
    """The ranks that hold the same parameters, whole: ZeRO-1 has whole gradients on every rank, too."""
    if job.layout.zero == 0:
        return "dp_replicate"
    return ALL_DATA if job.layout.dp_replicate > 1 else "dp_shard"


def build_pipeline(
    stages: Stages, job: Job, micro_batches: int, ranks: Ranks, precision: Precision
) -> Pipeline:
    """The stages of this rank, spread already, on a schedule."""
    layout, found = job.layout, {}
    split = schedule_of(job, micro_batches).split_backward
    buckets = iter(stage_buckets(job, ranks.place))
    for module, part in zip(stages, held_parts(job, ranks.place), strict=True):
        names, reducer = next(buckets), None
        if layout.data_degree > 1 and layout.zero < 2:
            group, late = ranks.group(_replica_axis(job)), late_parameters(module) if split else ()
            reducer = StageReducer(module, names, group, job.compression.kind, late)
        lender = cast(FSDPModule, next(iter(stages))) if part.lent and layout.zero >= 2 else None
        found[part.stage] = Stage.of(module, reducer, lender, split, job.train.compile)
    return Pipeline(found, job, micro_batches, ranks, precision)


def own_parameters(model: nn.Module, job: Job, ranks: Ranks, split: Split | None) -> Owned:
    """What of a spread model this rank updates."""
    if job.layout.zero >= 2:
        return OwnedShards(model, ranks, split)
    if job.layout.zero == 1:
        return OwnedRows(model, ranks, held_buckets(job, ranks.place), split)
    # Gradients of replicas are views of buckets: dropped, the next accumulation would hold a second copy.
    return Owned(model, ranks, split, keep_gradients=job.layout.dp_replicate > 1)


def without_reduction(module: nn.Module, job: Job, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: those before the last one leave something for later."""
    if isinstance(module, FSDPModule):
        begin_micro_batch(module, job, last)
    if isinstance(module, FixedBucketDDP) and not last:
        return module.no_sync()
    return nullcontext()


def agree_on_statistics(module: nn.Module, job: Job, ranks: Ranks) -> None:
    """After a step: what batch norms have seen becomes the same on all ranks; other models have nothing."""
    if job.mixes_samples and job.layout.dp_replicate > 1:
        average_statistics(module, ranks)
