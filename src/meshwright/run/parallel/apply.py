"""The parallelisms in the order in which they are applied, and what a rank then owns."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import list_parameters
from meshwright.plan.sharding import ALL_DATA
from meshwright.plan.tensor import held_model
from meshwright.run.mesh import Ranks
from meshwright.run.models.decoder import Decoder
from meshwright.run.models.init import WeightSource
from meshwright.run.parallel.data import FixedBucketDDP, apply_replicate, average_statistics
from meshwright.run.parallel.ownership import Owned, OwnedRows, OwnedShards
from meshwright.run.parallel.sharded import apply_sharding, begin_micro_batch
from meshwright.run.parallel.split import Split
from meshwright.spec.job import Job


def apply_layout(module: nn.Module, job: Job, ranks: Ranks, weights: WeightSource) -> nn.Module:
    """Spread a module over the ranks of data; one that lies nowhere yet gets its weights on the way.

    Its matrices were split over ``tp`` when it was built: innermost, before anything is cut or summed.
    """
    layout = job.layout
    if layout.zero >= 2:  # with dp_replicate a mesh of two axes: FSDP2 sums over both
        assert isinstance(module, Decoder), "the legality table shards decoders only"
        return apply_sharding(module, job, ranks, weights)
    if layout.zero == 1:  # whole gradients on every rank, as replicas have them
        return apply_replicate(module, job, ranks, ALL_DATA if layout.dp_replicate > 1 else "dp_shard")
    if layout.dp_replicate > 1:  # outermost: it sums whatever gradients the axes inside produce
        return apply_replicate(module, job, ranks, "dp_replicate")
    return module


def own_parameters(model: nn.Module, job: Job, ranks: Ranks, split: Split | None) -> Owned:
    """What of a spread model this rank updates."""
    if job.layout.zero >= 2:
        return OwnedShards(model, ranks, split)
    if job.layout.zero == 1:
        buckets = bucket_parameters(list_parameters(held_model(job)), job.layout.bucket_mb)
        return OwnedRows(model, ranks, buckets, split)
    # DDP's gradients are views of its buckets: dropped, the next accumulation would hold a second copy.
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
