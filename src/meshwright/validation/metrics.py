"""Prediction errors: size, ranking (Kendall's tau), and whether the predicted best is among the best."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.plan.estimate.grid import Floats
from meshwright.validation.evaluate import Outcome

NEAR_ERROR = 0.10
"""Error of the metric ``within_10pct``."""
BEST_WITHIN = 0.05
"""How much slower than the measured best the predicted best may be."""


@dataclass(frozen=True)
class Errors:
    """Relative errors (predicted / measured - 1) of some rows; None where there are no rows."""

    rows: int
    mape: float | None = None
    """Mean absolute error."""
    median: float | None = None
    """Median absolute error."""
    bias: float | None = None
    """Mean signed error; positive where predictions are too large."""
    worst: float | None = None
    """Largest absolute error."""
    within_10pct: float | None = None
    """Share of rows with an absolute error of at most 10%."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Of a list of errors."""
        if not errors:
            return cls(0)
        signed = np.array(errors)
        size = np.abs(signed)
        return cls(
            rows=len(errors),
            mape=float(size.mean()),
            median=float(np.median(size)),
            bias=float(signed.mean()),
            worst=float(size.max()),
            within_10pct=float((size <= NEAR_ERROR).mean()),
        )


def kendall_pairs(predicted: Floats, measured: Floats) -> tuple[int, int, int]:
    """Concordant minus discordant pairs, pairs not tied in the first, pairs not tied in the second."""
    upper = np.triu_indices(len(predicted), 1)
    first = np.sign(predicted[upper[0]] - predicted[upper[1]])
    second = np.sign(measured[upper[0]] - measured[upper[1]])
    return int((first * second).sum()), int((first != 0).sum()), int((second != 0).sum())


def kendall_tau(groups: Sequence[tuple[Floats, Floats]]) -> float | None:
    """Kendall's tau-b over all pairs within groups; None where no pair differs.

    Source: Kendall 1945, The treatment of ties in ranking problems. Pairs across groups are not compared.
    """
    counts = np.array([kendall_pairs(*group) for group in groups]).reshape(-1, 3).sum(axis=0)
    scale = float(np.sqrt(float(counts[1]) * float(counts[2])))
    return float(counts[0]) / scale if scale else None


def comparable_groups(outcomes: Sequence[Outcome]) -> list[tuple[Floats, Floats]]:
    """Predicted and measured tokens/s, grouped by model, sequence length, device and number of devices.

    Rows with equal layout and workload are repeated measurements: their mean counts.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[tuple[float, float]]]]
    groups = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        case, predicted = outcome.case, outcome.predicted_step_s
        if case is None or case.step_s is None or predicted is None:
            continue
        work = case.workload
        tokens = work.global_batch * work.seq_len
        key = (work.model, work.seq_len, work.cluster.device_name, case.layout.world_size)
        groups[key][work, case.layout].append((tokens / predicted, tokens / case.step_s))
    columns = [
        np.array([np.mean(again, axis=0) for again in g.values()]).T for g in groups.values() if len(g) > 1
    ]
    return [(pair[0], pair[1]) for pair in columns]


def best_found(predicted: Floats, measured: Floats) -> bool:
    """Whether the row predicted fastest ran within 5% of the fastest."""
    return bool(measured[np.argmax(predicted)] >= (1 - BEST_WITHIN) * measured.max())


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one family: rows that could be predicted, and their errors.

    Errors count gating rows; all rows in a family without any (`gates` says which).
    """
    expressed = [outcome for outcome in outcomes if outcome.case]
    gating = [outcome for outcome in expressed if outcome.case and outcome.case.gates]
    counted = gating or expressed
    groups = comparable_groups(counted)
    best = [best_found(*group) for group in groups]
    split = {
        "fit": [outcome for outcome in counted if not outcome.held_out],
        "held_out": [outcome for outcome in counted if outcome.held_out],
    }
    reasons = Counter(outcome.reason for outcome in outcomes if not outcome.case)
    return {
        "rows": len(outcomes),
        "expressed": len(expressed),
        "not_expressed": dict(reasons.most_common()),
        "gates": bool(gating),
        **errors_of(counted),
        "tau": kendall_tau(groups),
        "groups": len(groups),
        "best_within_5pct": sum(best) / len(best) if best else None,
        "split": {name: errors_of(part) for name, part in split.items()},
    }


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors of time and memory."""
    time = [error for outcome in outcomes if (error := outcome.step_error) is not None]
    memory = [error for outcome in outcomes if (error := outcome.memory_error) is not None]
    return {"time": asdict(Errors.of(time)), "memory": asdict(Errors.of(memory))}


def summarise_families(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Figures of each family, in order of first occurrence."""
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        families[outcome.row.family].append(outcome)
    return {name: summarise(members) for name, members in families.items()}


def worst_rows(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Gating rows with the largest error of time, worst first."""
    known = [outcome for outcome in outcomes if outcome.step_error is not None]
    gating = [outcome for outcome in known if outcome.case and outcome.case.gates]
    return sorted(gating or known, key=lambda outcome: -abs(outcome.step_error or 0.0))[:count]


@dataclass(frozen=True)
class Validation:
    """Predictions of published runs, and their errors."""

    outcomes: list[Outcome]
    """One per row of the tables."""

    @cached_property
    def families(self) -> dict[str, dict[str, Any]]:
        """Figures of each family, in order of first occurrence."""
        return summarise_families(self.outcomes)

    @cached_property
    def totals(self) -> dict[str, dict[str, Any]]:
        """Errors of all gating rows, of those used for the fit (``fit``), and of the rest (``held_out``)."""
        counted = [outcome for outcome in self.outcomes if outcome.case and outcome.case.gates]
        return {
            "all": errors_of(counted),
            "fit": errors_of([outcome for outcome in counted if not outcome.held_out]),
            "held_out": errors_of([outcome for outcome in counted if outcome.held_out]),
        }

    def worst(self, count: int) -> list[Outcome]:
        """Gating rows with the largest error of time, worst first."""
        return worst_rows(self.outcomes, count)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright validate --json``."""
        rows = [outcome.as_dict() for outcome in self.outcomes]
        return {"families": self.families, "totals": self.totals, "rows": rows}
