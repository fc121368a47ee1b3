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

from meshwright.layout.axes import dense_sum_axis, experts_apart, gradient_axis, uses_ddp
from meshwright.layout.stages import held_buckets, held_parts, list_stages, schedule_of, stage_buckets
from meshwright.models.decoder import Decoder, Stages
from meshwright.models.init import WeightSource
from meshwright.models.linear import late_parameters
from meshwright.parallel.bucket_reducer import BucketReducer, Buckets
from meshwright.parallel.ddp import FixedBucketDDP, apply_replicate, average_statistics
from meshwright.parallel.fsdp import apply_sharding, begin_micro_batch
from meshwright.parallel.full_tensors import is_cut
from meshwright.parallel.local_shards import Pieces
from meshwright.parallel.mesh import Ranks
from meshwright.parallel.pipeline.mixed_precision import MixedPrecision
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.stages import Stage
from meshwright.parallel.zero1 import Owned, OwnedRows, OwnedShards, list_summed
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def apply_layout(module: nn.Module, job: Job, ranks: Ranks, weights: WeightSource) -> nn.Module:
    """Spread a module over the ranks of data; one that lies nowhere yet gets its weights on the way.

    The stages of a pipeline are spread each on its own.
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
    if uses_ddp(job):
        return apply_replicate(module, job, ranks, dense_sum_axis(layout).name)
    return module


def build_reducer(module: nn.Module, job: Job, ranks: Ranks) -> BucketReducer | None:
    """Sums the gradients of a model where DDP cannot: experts are summed over other ranks than the rest."""
    if job.layout.zero >= 2 or not experts_apart(job):
        return None
    buckets = _find_groups(job, ranks, held_buckets(job, ranks.place))
    return BucketReducer(module, buckets, job.compression.kind) if buckets else None


def _find_groups(job: Job, ranks: Ranks, buckets: list[list[str]]) -> Buckets:
    """The ranks over which each bucket is summed; those that no other rank has a part of are left out."""
    axes = [gradient_axis(job, names[0]) for names in buckets]
    return [(n, ranks.group(axis.name)) for n, axis in zip(buckets, axes, strict=True) if axis.size > 1]


def build_pipeline(
    stages: Stages, job: Job, micro_batches: int, ranks: Ranks, precision: MixedPrecision
) -> Pipeline:
    """The stages of this rank, spread already, on a schedule."""
    layout, found = job.layout, {}
    split = schedule_of(job, micro_batches).split_backward
    buckets = iter(stage_buckets(job, ranks.place))
    for module, part in zip(stages, held_parts(job, ranks.place), strict=True):
        summed, reducer = _find_groups(job, ranks, next(buckets)), None
        if summed and layout.zero < 2:
            late = late_parameters(module) if split else ()
            reducer = BucketReducer(module, summed, job.compression.kind, late)
        lender = cast("FSDPModule", next(iter(stages))) if part.lent and layout.zero >= 2 else None
        found[part.stage] = Stage.of(module, reducer, lender, split, job.train.compile)
    return Pipeline(found, job, micro_batches, ranks, precision)


def own_parameters(model: nn.Module, job: Job, ranks: Ranks, pieces: Pieces | None) -> Owned:
    """What of a spread model this rank updates."""
    if job.layout.zero >= 2:
        return OwnedShards(model, job, ranks, pieces)
    if job.layout.zero == 1:
        return OwnedRows(model, job, ranks, held_buckets(job, ranks.place), pieces)
    # Summed gradients are views of buckets: dropped, the next accumulation would hold a second copy.
    summed = list_summed(job, (name for name, _ in model.named_parameters()))
    return Owned(model, ranks, pieces, keep_gradients=summed)


def without_reduction(module: nn.Module, job: Job, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: those before the last one leave something for later."""
    if is_cut(module):
        begin_micro_batch(module, job, last)
    if isinstance(module, FixedBucketDDP) and not last:
        return module.no_sync()
    return nullcontext()


def agree_on_statistics(module: nn.Module, job: Job, ranks: Ranks) -> None:
    """After a step: what batch norms have seen becomes the same on all ranks; other models have nothing."""
    if job.mixes_samples and job.layout.dp_replicate > 1:
        average_statistics(module, ranks)
