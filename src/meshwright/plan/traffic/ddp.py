"""Traffic of DDP and ZeRO-1: gradient buckets, and the all-gather of updated parameters.

Every bucket is all-reduced once per step over the ranks that hold the same parameters. ZeRO-1 then
all-gathers the updated parameters, one call per bucket, rows padded. Routed experts with their own axes
have their own buckets (``layout.axes``). A single process, and experts without replicas, have no calls.
"""

from __future__ import annotations

from meshwright.layout.axes import (
    INTER_NODE_AXIS,
    INTRA_NODE_AXIS,
    dense_reduce_axis,
    gradient_axis,
    has_expert_axes,
    is_expert,
    state_axis,
    uses_ddp,
)
from meshwright.layout.backup_replicas import CLAIM_BYTES, padded_buckets
from meshwright.layout.ddp_buckets import count_buckets
from meshwright.layout.fsdp_groups import padded_count
from meshwright.layout.hierarchy import Hierarchy, bucket_sizes, find_hierarchy
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, count_statistics
from meshwright.layout.stages import list_parameter_kinds, local_stages
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job

INT32_BYTES = 4


def predict_ddp(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """Bucket traffic of a rank, and the batch norm statistics."""
    if job.layout.backup_replicas:
        return _backup_traffic(job)
    parts, apart = local_stages(job, pp_rank), has_expert_axes(job)
    counts = [count_buckets(part.representative, apart, job.layout.bucket_mb) for part in parts]
    kinds = list_parameter_kinds(parts)
    rows, hierarchy = [], find_hierarchy(job)
    if uses_ddp(job):
        rows.append(_setup_traffic(job, sum(p.repeats for p in kinds), sum(map(sum, counts))))
    for experts in (False, True):
        buckets = sum(count[experts] for count in counts)
        held = [p for p in kinds if (apart and is_expert(p.name)) is experts]
        if not buckets:
            continue
        sums, shards = gradient_axis(job, held[0].name), state_axis(job, held[0].name)
        if sums.size > 1 and hierarchy is not None:
            rows += _hierarchical_traffic(job, hierarchy)
        elif sums.size > 1:
            size = sum(p.count for p in held) * WIRE_BYTES[job.compression.kind]
            rows.append(CollectiveTraffic(sums.name, "all_reduce", "step", sums.size, buckets, size))
        if shards.size > 1:
            size = sum(padded_count(p, shards.size) for p in held) * FLOAT32_BYTES
            rows.append(CollectiveTraffic(shards.name, "all_gather", "step", shards.size, buckets, size))
    if (statistics := count_statistics(job.model)) and job.layout.dp_replicate > 1:
        # Averaged at the end of a step, in one call.
        size = statistics * FLOAT32_BYTES
        rows.append(CollectiveTraffic("dp_replicate", "all_reduce", "step", job.layout.dp_replicate, 1, size))
    return rows


def _hierarchical_traffic(job: Job, hierarchy: Hierarchy) -> list[CollectiveTraffic]:
    """Whole buckets inside a node, padded to equal shards; shards between nodes."""
    buckets = bucket_sizes(job)
    calls = sum(len(hierarchy.chunks(count)) for count in buckets)
    inside, between = hierarchy.ranks_per_node, hierarchy.nodes
    size = sum(map(hierarchy.padded, buckets)) * FLOAT32_BYTES
    return [
        CollectiveTraffic(INTRA_NODE_AXIS, "reduce_scatter", "step", inside, calls, size),
        CollectiveTraffic(INTER_NODE_AXIS, "all_reduce", "step", between, calls, size // inside),
        CollectiveTraffic(INTRA_NODE_AXIS, "all_gather", "step", inside, calls, size),
    ]


def _backup_traffic(job: Job) -> list[CollectiveTraffic]:
    """Backup replicas: an all-gather of claims, then an all-to-all and an all-gather per bucket."""
    ranks, buckets = job.layout.dp_replicate, padded_buckets(job)
    size = sum(buckets) * FLOAT32_BYTES
    return [
        CollectiveTraffic(
            "dp_replicate", "all_gather", "step", ranks, len(buckets) + 1, size + ranks * CLAIM_BYTES
        ),
        CollectiveTraffic("dp_replicate", "all_to_all", "step", ranks, len(buckets), size),
    ]


def _setup_traffic(job: Job, parameters: int, buckets: int) -> CollectiveTraffic:
    """DDP broadcasts its buckets from rank 0: parameter indices and a count, then the sizes."""
    axis = dense_reduce_axis(job.layout)
    return CollectiveTraffic(
        axis.name, "broadcast", "setup", axis.size, 2, (parameters + 1 + buckets) * INT32_BYTES
    )
