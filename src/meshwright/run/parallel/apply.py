"""The parallelisms in the order in which they are applied. Today there is one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from meshwright.run.mesh import Ranks
from meshwright.run.parallel.data import FixedBucketDDP, apply_replicate, average_statistics
from meshwright.spec.job import Job


def apply_layout(module: nn.Module, job: Job, ranks: Ranks) -> nn.Module:
    """Spread a module as the layout says."""
    if job.layout.dp_replicate > 1:  # outermost: it sums whatever gradients the axes inside produce
        module = apply_replicate(module, job, ranks)
    return module


def without_reduction(module: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Micro-batches before the last one only add to the local gradients."""
    if isinstance(module, FixedBucketDDP) and not last:
        return module.no_sync()
    return nullcontext()


def agree_on_statistics(module: nn.Module, job: Job, ranks: Ranks) -> None:
    """After a step: what batch norms have seen becomes the same on all ranks; other models have nothing."""
    if job.mixes_samples and job.layout.dp_replicate > 1:
        average_statistics(module, ranks)
