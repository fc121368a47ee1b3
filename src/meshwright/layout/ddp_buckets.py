"""The gradient buckets of DDP, fixed before the first step.

By default torch's DDP starts with one bucket and rebuilds the buckets after the first step, in the order in
which gradients became ready. A resumed run repeats that first step, so its reductions have other boundaries
and differ in the last bits. Here the boundaries depend on the model only: parameters in reverse registration
order (close to the order of the backward pass) fill buckets greedily; the parameter that reaches the size
limit closes its bucket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.core.units import MIB
from meshwright.layout.axes import has_expert_axes, is_expert
from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    Parameter,
    name_in_block,
)
from meshwright.layout.stages import StageSpec, local_stages
from meshwright.spec.job import Job


def bucket_parameters(parameters: Sequence[Parameter], bucket_mb: float) -> list[list[str]]:
    """Names in each bucket, in the order in which the buckets are reduced."""
    cap_bytes = int(bucket_mb * MIB)
    buckets: list[list[str]] = []
    filling: list[str] = []
    filled_bytes = 0
    for parameter in reversed(parameters):
        filling.append(parameter.name)
        filled_bytes += parameter.count * FLOAT32_BYTES
        if filled_bytes >= cap_bytes:
            buckets.append(filling)
            filling, filled_bytes = [], 0
    return [*buckets, filling] if filling else buckets


def stage_buckets(job: Job, pp_rank: int) -> list[list[list[str]]]:
    """The gradient buckets of each stage of a pp rank.

    Experts with separate axes have separate buckets, after the dense ones.
    """
    return [
        [
            [p.name for p in bucket]
            for bucket in bucket_stage(part, has_expert_axes(job), job.layout.bucket_mb)
        ]
        for part in local_stages(job, pp_rank)
    ]


@functools.lru_cache(maxsize=512)
def bucket_stage(part: StageSpec, apart: bool, bucket_mb: float) -> tuple[tuple[Parameter, ...], ...]:
    """The gradient buckets of one stage.

    Args:
        part: The stage.
        apart: Whether experts have separate axes, and so separate buckets.
        bucket_mb: The size at which a bucket closes, in MiB.
    """
    named = {p.name: p for p in part.parameters}
    experts = [p for p in part.parameters if apart and is_expert(p.name)]
    dense = [p for p in part.parameters if not (apart and is_expert(p.name))]
    buckets = [names for kind in (dense, experts) for names in bucket_parameters(kind, bucket_mb)]
    return tuple(tuple(named[name] for name in names) for names in buckets)


class BucketKinds(NamedTuple):
    """The gradient buckets of one stage, grouped by kind: most are identical."""

    kinds: tuple[tuple[Parameter, ...], ...]
    """The distinct buckets, each with its parameters by kind."""
    order: tuple[int, ...]
    """The kind of each bucket."""


@functools.lru_cache(maxsize=512)
def bucket_kinds(part: StageSpec, apart: bool, bucket_mb: float) -> BucketKinds:
    """The buckets of :func:`bucket_stage` by kind."""
    known: dict[tuple[str, tuple[int, ...]], Parameter] = {}
    found: dict[tuple[tuple[Parameter, int], ...], int] = {}
    order = []
    for bucket in bucket_stage(part, apart, bucket_mb):
        kinds = Counter(known.setdefault((name_in_block(p.name), p.shape), p) for p in bucket)
        order.append(found.setdefault(tuple(kinds.items()), len(found)))
    distinct = (tuple(dataclasses.replace(p, repeats=times) for p, times in kinds) for kinds in found)
    return BucketKinds(tuple(distinct), tuple(order))


@functools.lru_cache(maxsize=4096)
def count_buckets(part: StageSpec, apart: bool, bucket_mb: float) -> tuple[int, int]:
    """The number of dense gradient buckets of a stage, and of expert buckets with separate axes."""
    buckets = bucket_stage(part, apart, bucket_mb)
    experts = sum(apart and is_expert(bucket[0].name) for bucket in buckets)
    return len(buckets) - experts, experts


def local_buckets(job: Job, pp_rank: int) -> list[list[str]]:
    """The gradient buckets of all stages of a pp rank."""
    return [names for buckets in stage_buckets(job, pp_rank) for names in buckets]
