"""Rows and chart of the scaling benchmark, from the times that ranks report.

Each rank records when a gradient bucket is ready and when it is reduced, on the clock that all processes of a
machine share. An all-reduce runs from when the last rank has its bucket ready until the last rank has the
result; waiting for a late rank does not count. Per step::

    communication = time during which at least one all-reduce runs
    exposed       = the part of it after the last bucket became ready, when the backward pass is over
    overlap       = 1 - exposed / communication

A row has the medians over the steps, and the quartiles of the overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.core.units import format_plural
from meshwright.plan.contract import PlanContract
from meshwright.report.plot import Chart, Series

WARM_UP = 3
"""Warm-up steps: the first, the audited one, and one more."""
FEWEST_STEPS = WARM_UP + 3

Times = Mapping[str, Any]
"""``step_s`` of one rank, and ``buckets``: of each step, when each bucket was ready and reduced."""


@dataclass(frozen=True)
class ScalingRow:
    """One number of ranks."""

    ranks: int
    global_batch: int
    micro_batch: int
    micro_batches: int
    tokens_per_step: int
    step_s: float
    step_s_low: float
    step_s_high: float
    """Quartiles of the step's time."""
    tokens_per_s: float
    speedup: float
    efficiency: float
    communication_s: float
    exposed_s: float
    overlap: float | None
    overlap_low: float | None
    overlap_high: float | None
    """None if nothing is reduced."""
    predicted_step_s: float
    shared_cores: bool
    audit_ok: bool

    def as_dict(self) -> dict[str, Any]:
        """The row for ``--json``."""
        return asdict(self)


def slowest(times: Sequence[Times]) -> list[float]:
    """The time of the slowest rank, for each counted step."""
    return [max(values) for values in zip(*(rank["step_s"] for rank in times), strict=True)][WARM_UP:]


def build_row(
    plan: PlanContract, times: Sequence[Times], tokens_per_step: int, audit_ok: bool, base: ScalingRow | None
) -> ScalingRow:
    """Summarise the times of the ranks.

    Args:
        plan: The plan of this number of ranks.
        times: What each rank reported.
        tokens_per_step: As measured.
        audit_ok: Whether the run matches its plan.
        base: The row that speed-up is relative to; this row if None.
    """
    steps = slowest(times)
    step_s = statistics.median(steps)
    low, high = quartiles(steps)
    rate = tokens_per_step / step_s
    speedup = rate / base.tokens_per_s if base else 1.0
    reduced = [_reductions(step) for step in zip(*(rank["buckets"] for rank in times), strict=True)][WARM_UP:]
    moving = [(whole, exposed) for whole, exposed in reduced if whole > 0]
    overlaps = [1 - exposed / whole for whole, exposed in moving]
    layout = plan.job.layout
    return ScalingRow(
        ranks=plan.world_size,
        global_batch=plan.job.train.global_batch,
        micro_batch=layout.micro_batch or 0,
        micro_batches=plan.micro_batches,
        tokens_per_step=tokens_per_step,
        step_s=step_s,
        step_s_low=low,
        step_s_high=high,
        tokens_per_s=rate,
        speedup=speedup,
        efficiency=speedup * (base.ranks if base else plan.world_size) / plan.world_size,
        communication_s=statistics.median(whole for whole, _ in moving) if moving else 0.0,
        exposed_s=statistics.median(exposed for _, exposed in moving) if moving else 0.0,
        overlap=statistics.median(overlaps) if overlaps else None,
        overlap_low=quartiles(overlaps)[0] if overlaps else None,
        overlap_high=quartiles(overlaps)[1] if overlaps else None,
        predicted_step_s=plan.step_s,
        shared_cores=plan.job.cluster.device == "cpu" and plan.world_size > plan.job.cluster.world_size,
        audit_ok=audit_ok,
    )


def _reductions(ranks: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Communication time of one step, and its exposed part."""
    spans = []
    for bucket in zip(*ranks, strict=True):  # the same bucket on every rank
        begin, end = max(ready for ready, _ in bucket), max(reduced for _, reduced in bucket)
        spans.append((begin, max(begin, end)))
    if not spans:
        return 0.0, 0.0
    last_ready = max(begin for begin, _ in spans)
    whole, covered = 0.0, min(begin for begin, _ in spans)
    for begin, end in sorted(spans):
        whole += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return whole, max(0.0, covered - last_ready)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def scaling_chart(rows: Sequence[ScalingRow], weak: bool, note: str = "") -> Chart:
    """Measured and ideal speed-up over ranks.

    Args:
        rows: By number of ranks.
        weak: Whether the batch grows with the ranks.
        note: Job, machine and date.
    """
    first = rows[0]
    ideal = tuple((float(row.ranks), row.ranks / first.ranks) for row in rows)
    measured = tuple((float(row.ranks), row.speedup) for row in rows)
    kind = "weak scaling: the batch grows with the ranks" if weak else "strong scaling: one global batch"
    return Chart(
        title=f"Speed-up, {kind}",
        x_label="ranks",
        y_label=f"times the rate of {format_plural(first.ranks, 'rank')}",
        series=(Series("ideal", (ideal,), 2, dashed=True), Series("measured", (measured,), 0)),
        from_zero=True,
        whole_x=True,
        note=note,
    )


def basis(rows: Sequence[ScalingRow], steps: int) -> str:
    """How the figures were measured."""
    counted, first = steps - WARM_UP, rows[0].ranks
    return (
        f"medians of {counted} steps after {WARM_UP} of warm-up, slowest rank of each; "
        f"speed-up and efficiency against {format_plural(first, 'rank')}; "
        "all-reduce = time during which gradients are reduced, exposed = its part after the backward pass, "
        "overlap = 1 - exposed / all-reduce"
    )
