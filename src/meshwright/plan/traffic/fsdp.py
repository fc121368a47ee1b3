"""Collectives of FSDP (ZeRO-2 and 3); see ``layout.fsdp_groups``."""

from __future__ import annotations

from meshwright.layout.axes import (
    dense_shard_axis,
)
from meshwright.layout.fsdp_groups import FsdpGroup, group_axis, group_block, group_root
from meshwright.layout.parameters import (
    WIRE_BYTES,
)
from meshwright.layout.pipeline_schedules import schedule_of
from meshwright.layout.stages import local_stages
from meshwright.plan.contract import CollectiveTraffic
from meshwright.schedule.pipeline.actions import Kind
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches


def predict_fsdp(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """ZeRO-2 and 3: all-gathers of parameter groups, reduce-scatters of their gradients."""
    parts = [part.representative for part in local_stages(job, pp_rank)]
    rows = []
    for part in parts:
        for layer, times in part.block_kinds:
            rows += [row for group in group_block(part, layer) for row in _group_traffic(job, group, times)]
        rows += [row for group in group_root(part) for row in _group_traffic(job, group, 1)]
    if more := _count_tied_gathers(job, pp_rank, count_micro_batches(job)):
        axis, (around,) = dense_shard_axis(job.layout), group_root(parts[0])
        size = around.gathered_bytes(axis.size, job.train.precision)
        rows.append(CollectiveTraffic(axis.name, "all_gather", "step", axis.size, more, more * size))
    return rows


def _group_traffic(job: Job, group: FsdpGroup, groups: int) -> list[CollectiveTraffic]:
    """Traffic of a number of equal groups."""
    layout, axis = job.layout, group_axis(job, group)
    micro_batches = count_micro_batches(job)
    evaluations = count_micro_batches(job, job.train.eval_samples) if group.block else 1
    gathers = micro_batches * (2 if group.block else 1)
    if layout.zero == 2:  # stays gathered until the last backward pass, or the end of the evaluation
        gathers = evaluations = 1
    reductions = 1 if layout.accumulate == "deferred" else micro_batches
    gathered = groups * group.gathered_bytes(axis.size, job.train.precision)
    reduced = groups * group.padded(axis.size) * WIRE_BYTES[job.compression.kind]
    rows = []
    if axis.size > 1:
        rows = [
            CollectiveTraffic(axis.name, op, phase, axis.size, groups * times, times * size)
            for op, phase, times, size in (
                ("all_gather", "step", gathers, gathered),
                ("all_gather", "eval", evaluations, gathered),
                ("reduce_scatter", "step", reductions, reduced),
            )
        ]
    if layout.dp_replicate > 1:
        # Float32 gradients accumulate before the all-reduce over replicas. Compressed ones are reduced per
        # micro-batch: accumulating them in 16 bits would round.
        times = 1 if job.compression.kind == "none" else micro_batches
        size = times * reduced // axis.size
        rows.append(
            CollectiveTraffic("dp_replicate", "all_reduce", "step", layout.dp_replicate, groups * times, size)
        )
    return rows


def _count_tied_gathers(job: Job, pp_rank: int, micro_batches: int) -> int:
    """Extra all-gathers of a tied embedding under ZeRO-3, where first and last stage share a rank.

    The embedding stays gathered until the first stage's next backward pass. The gathers of the first stage
    itself are counted with its group.
    """
    parts = local_stages(job, pp_rank)
    if job.layout.zero < 3 or not parts or not parts[-1].shares_embedding:
        return 0
    gathered, gathers, last = False, 0, parts[-1].stage
    for kind, stage, _ in schedule_of(job, micro_batches).ranks[pp_rank]:
        uses = (kind is Kind.FORWARD and stage in (0, last)) or (kind is Kind.BACKWARD and stage == 0)
        if uses and not gathered:
            gathered, gathers = True, gathers + 1
        if kind is Kind.BACKWARD and stage == 0:
            gathered = False
    return gathers - micro_batches
