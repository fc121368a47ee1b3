"""From the times that ranks report to a row of the scaling table, and the picture of all rows.

In every round each rank times a normal step (a), the same step without gradient reductions (b), and the
reductions alone (c). A round's time is that of the slowest rank. Then::

    exposed = median(a - b)                 what the reductions add to the step
    overlap = 1 - exposed / median(c)       the share of them that hides behind the backward pass

clipped to 0 and 1. The spread of the overlap is that of its values by round: the quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.explain.plot import Chart, Series
from meshwright.plan.contract import Plan

WARM_UP = 3
"""Rounds that are not counted: the first step, the audited one, and one more."""
FEWEST_STEPS = WARM_UP + 3
WIDE_SPREAD = 0.5
"""Quartiles of the overlap that lie further apart say more about the machine than about the job."""

Times = Mapping[str, Sequence[float]]
"""``normal_s``, ``unreduced_s`` and ``reductions_s`` of one rank, a value a round."""


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
    """None where there is nothing to reduce."""
    predicted_step_s: float
    shared_cores: bool
    audit_ok: bool

    @property
    def noisy(self) -> bool:
        """Whether the overlap is lost in what else goes on."""
        low, high = self.overlap_low, self.overlap_high
        return low is not None and high is not None and high - low > WIDE_SPREAD

    def as_dict(self) -> dict[str, Any]:
        """The row for ``--json``."""
        return asdict(self)


def slowest(times: Sequence[Times], name: str) -> list[float]:
    """Of each counted round, the time of the slowest rank."""
    return [max(values) for values in zip(*(rank[name] for rank in times), strict=True)][WARM_UP:]


def build_row(
    plan: Plan, times: Sequence[Times], tokens_per_step: int, audit_ok: bool, base: ScalingRow | None
) -> ScalingRow:
    """Fold the ranks' times.

    Args:
        plan: The plan of this number of ranks.
        times: What each rank reported.
        tokens_per_step: Measured, not promised.
        audit_ok: Whether the plan held.
        base: The row that speed-up is counted against; this one if there is none.
    """
    normal = slowest(times, "normal_s")
    step_s = statistics.median(normal)
    low, high = quartiles(normal)
    rate = tokens_per_step / step_s
    speedup = rate / base.tokens_per_s if base else 1.0
    communication_s, exposed_s, overlaps = _overlap(normal, times)
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
        communication_s=communication_s,
        exposed_s=exposed_s,
        overlap=_clip(1 - exposed_s / communication_s) if overlaps else None,
        overlap_low=quartiles(overlaps)[0] if overlaps else None,
        overlap_high=quartiles(overlaps)[1] if overlaps else None,
        predicted_step_s=plan.step_s,
        shared_cores=plan.job.cluster.device == "cpu" and plan.world_size > plan.job.cluster.world_size,
        audit_ok=audit_ok,
    )


def _overlap(normal: Sequence[float], times: Sequence[Times]) -> tuple[float, float, list[float]]:
    """Communication alone, its exposed part, and the overlap by round; zeros where nothing is reduced."""
    if not times[0]["reductions_s"]:
        return 0.0, 0.0, []
    unreduced, alone = slowest(times, "unreduced_s"), slowest(times, "reductions_s")
    differences = [a - b for a, b in zip(normal, unreduced, strict=True)]
    communication_s = statistics.median(alone)
    overlaps = [_clip(1 - d / communication_s) for d in differences]
    return communication_s, max(0.0, statistics.median(differences)), overlaps


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def scaling_chart(rows: Sequence[ScalingRow], weak: bool) -> Chart:
    """Speed-up over ranks, beside the ideal."""
    first = rows[0]
    ideal = tuple((float(row.ranks), row.ranks / first.ranks) for row in rows)
    measured = tuple((float(row.ranks), row.speedup) for row in rows)
    kind = "weak scaling: the batch grows with the ranks" if weak else "strong scaling: one global batch"
    against = "1 rank" if first.ranks == 1 else f"{first.ranks} ranks"
    return Chart(
        title=f"Speed-up, {kind}",
        x_label="ranks",
        y_label=f"times the rate of {against}",
        series=(Series("ideal", (ideal,), 2, dashed=True), Series("measured", (measured,), 0)),
        from_zero=True,
        whole_x=True,
    )


def basis(rows: Sequence[ScalingRow], rounds: int) -> str:
    """How the figures came about, in a sentence."""
    counted, first = rounds - WARM_UP, rows[0].ranks
    return (
        f"medians of {counted} rounds after {WARM_UP} of warm-up, slowest rank of each; "
        f"speed-up and efficiency against {first} rank{'s' if first > 1 else ''}; "
        "exposed = step - step without reductions, interleaved; overlap = 1 - exposed / reductions alone"
    )
