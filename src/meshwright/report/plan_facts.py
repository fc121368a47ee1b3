"""Facts behind the text of a plan: the range of its step time, and the parts of a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.units import format_bytes
from meshwright.layout.flops import peak_rate
from meshwright.layout.placement import tier_of
from meshwright.plan.contract import PlanContract, RankPrediction
from meshwright.plan.memory.compiled import has_exact_peak
from meshwright.plan.memory.fit import MemoryNeed, describe_usable
from meshwright.plan.time.interval import step_interval
from meshwright.spec.execution import uses_torch_compile


@dataclass(frozen=True)
class StepRange:
    """Bounds of the predicted time of a step."""

    low_s: float
    high_s: float
    basis: str
    """The measured runs that they come from."""


def find_step_range(plan: PlanContract) -> StepRange:
    """The bounds of a plan's step time."""
    spread = step_interval(plan.job)
    return StepRange(plan.step_s * spread.low, plan.step_s * spread.high, spread.basis)


def describe_basis(plan: PlanContract) -> str:
    """What the step time and the MFU are based on."""
    job = plan.job
    _, peak = peak_rate(job.cluster, job.train.precision)
    return f"interval: {find_step_range(plan).basis}; MFU relative to {peak}; rates: {job.cluster.basis}"


def find_tiers(plan: PlanContract) -> dict[str, str]:
    """The slowest network tier that the collectives of each axis cross: node, rack or spine."""
    return {row.axis: tier_of(plan.job, row.axis, plan.placement) for row in plan.collectives}


def describe_accuracy(plan: PlanContract) -> str:
    """How the predicted memory is to be read; empty if it is exact."""
    if not plan.exact:
        return " (estimated)"
    if uses_torch_compile(plan.job) and not has_exact_peak(plan.job):
        return " (upper bound: compiled blocks need less)"
    return ""


def memory_rows(plan: PlanContract, rank: RankPrediction) -> list[tuple[str, str, str]]:
    """Table rows from the peaks of live tensors to the memory that a rank needs."""
    need = MemoryNeed.of(plan.job, rank.peak_bytes, rank.first_peak_bytes)
    rows = [
        ("peak, steady step", format_bytes(need.steady_step), f"at: {rank.peak_at}"),
        ("peak, first step", format_bytes(need.first_step), ""),
    ]
    if need.context:
        share = need.allocator / max(need.peaks.values())
        rows.append(("allocator", format_bytes(need.allocator), f"{share:.0%} of the larger peak"))
        rows.append(("context", format_bytes(need.context), "CUDA and NCCL"))
    usable = describe_usable(plan.job.cluster)
    rows.append(
        ("needed", format_bytes(need.needed_bytes), f"limited by the {need.limited_by}; usable: {usable}")
    )
    return rows
