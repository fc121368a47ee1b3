"""A plan and a run in a few lines, for ``meshwright train`` without ``-v``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.units import format_bytes, format_count, format_seconds, format_throughput
from meshwright.layout.text import describe_layout
from meshwright.report.plan_facts import find_step_range
from meshwright.spec.execution import explain_block_backend

if TYPE_CHECKING:
    from meshwright.results import PlanContract


def summarize_plan(plan: PlanContract) -> list[str]:
    """The layout, what is predicted of it, and the reason for the block backend."""
    job, spread = plan.job, find_step_range(plan)
    ranks, devices = plan.world_size, job.cluster.world_size
    on = f"on {ranks} of {devices} devices" if ranks <= devices else f"in {ranks} ranks on {devices} devices"
    low, high = format_seconds(spread.low_s), format_seconds(spread.high_s)
    rate = format_throughput(plan.tokens_per_step / plan.step_s, job.unit)
    needed = max(rank.needed_bytes for rank in plan.classes().values())
    memory = f"{format_bytes(needed)} of {format_bytes(plan.usable_bytes)} per rank"
    model = f"{job.name}, {format_count(plan.parameters)} parameters"
    step = f"{format_seconds(plan.step_s)}/step ({low} to {high})"
    return [
        f"plan: {model}, {describe_layout(job.layout)} {on} ({job.cluster.device_name})",
        f"predicted: {step}, {rate}, MFU {plan.mfu:.1%}, {memory}",
        *explain_block_backend(job),
    ]
