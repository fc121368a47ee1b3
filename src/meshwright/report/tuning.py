"""Layouts that ``tune`` ran for a few steps: predicted and measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.audit.record import RunRecord
from meshwright.layout.text import layout_overrides
from meshwright.plan.contract import PlanContract
from meshwright.report.scaling import Times, quartiles, slowest


@dataclass(frozen=True)
class Measurement:
    """Measured figures of a layout."""

    step_s: float
    step_s_low: float
    step_s_high: float
    """Median and quartiles of the counted steps, by the slowest rank of each."""
    tokens_per_s: float
    peak_memory_bytes: int | None
    """Peak of the rank with the highest one; None for compiled code."""
    audit_ok: bool


@dataclass(frozen=True)
class TuneRow:
    """One layout."""

    plan: PlanContract
    measured: Measurement | None
    """None: it did not run."""
    reason: str = ""
    """Why it did not."""

    @property
    def overrides(self) -> str:
        """The layout, as overrides of the job."""
        return layout_overrides(self.plan.job.layout)

    @property
    def predicted_peak_bytes(self) -> int:
        """Peak of the rank with the highest one, in steps after the first."""
        return max(rank.peak_bytes for rank in self.plan.ranks)

    def as_dict(self, recalibrated_step_s: float | None) -> dict[str, Any]:
        """The row for ``--json``."""
        nothing = dict.fromkeys((field.name for field in dataclasses.fields(Measurement)), None)
        return {
            "layout": self.overrides,
            "world_size": self.plan.world_size,
            "micro_batches": self.plan.micro_batches,
            "predicted_step_s": self.plan.step_s,
            "recalibrated_step_s": recalibrated_step_s,
            "predicted_tokens_per_s": self.plan.tokens_per_step / self.plan.step_s,
            "predicted_peak_memory_bytes": self.predicted_peak_bytes,
            **(dataclasses.asdict(self.measured) if self.measured else nothing),
            "reason": self.reason,
        }


def summarize_times(times: Sequence[Times], record: RunRecord, audit_ok: bool) -> Measurement:
    """The figures of one layout from the times of its ranks."""
    steps = slowest(times)
    step_s = statistics.median(steps)
    low, high = quartiles(steps)
    peaks = [found.peak_bytes for found in record.state.values() if found.peak_bytes is not None]
    rate = record.tokens_per_step / step_s
    return Measurement(step_s, low, high, rate, max(peaks, default=None), audit_ok)


def sort_rows(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """The shortest measured step first; layouts that did not run last."""
    return sorted(rows, key=lambda row: (row.measured is None, row.measured.step_s if row.measured else 0.0))
