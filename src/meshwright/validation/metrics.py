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
from meshwright.validation.limits import Limits
from meshwright.validation.residuals import interval_cover, plan_interval_cover

NEAR_ERROR = 0.10
"""Error of the metric ``within_10pct``."""
BEST_WITHIN = 0.05
"""How much slower than the measured best the predicted best may be."""
TIED = 0.03
"""Layouts whose measurements are closer than this are tied."""
WELL_RANKED = 0.7
"""Kendall's tau from which a sweep counts as ranked well."""
SWEEP = 5
"""Least layouts of a sweep that is ranked by itself."""


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
        """The figures of a list of errors."""
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


def kendall_pairs(predicted: Floats, measured: Floats, tied: float = 0.0) -> tuple[int, int, int]:
    """Concordant minus discordant pairs, pairs not tied in the first, pairs not tied in the second.

    Args:
        predicted: The first.
        measured: The second.
        tied: Pairs whose measurements differ by at most this fraction are not compared.
    """
    upper = np.triu_indices(len(predicted), 1)
    first, second = predicted[upper[0]] - predicted[upper[1]], measured[upper[0]] - measured[upper[1]]
    if tied:
        apart = np.abs(second) > tied * np.minimum(measured[upper[0]], measured[upper[1]])
        first, second = first[apart], second[apart]
    first, second = np.sign(first), np.sign(second)
    return int((first * second).sum()), int((first != 0).sum()), int((second != 0).sum())


def kendall_tau(groups: Sequence[tuple[Floats, Floats]], tied: float = 0.0) -> float | None:
    """Kendall's tau-b over all pairs within groups; None where no pair differs.

    Source: Kendall 1945, The treatment of ties in ranking problems. Pairs across groups are not compared.
    """
    counts = np.array([kendall_pairs(*group, tied) for group in groups]).reshape(-1, 3).sum(axis=0)
    scale = float(np.sqrt(float(counts[1]) * float(counts[2])))
    return float(counts[0]) / scale if scale else None


def comparable_groups(outcomes: Sequence[Outcome]) -> list[tuple[Floats, Floats]]:
    """Predicted and measured tokens/s, by model, sequence length, device, number of devices and framework.

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
        ranks = case.layout.world_size
        key = (work.model, work.seq_len, work.cluster.device_name, ranks, work.profile.name)
        groups[key][work, case.layout].append((tokens / predicted, tokens / case.step_s))
    columns = [
        np.array([np.mean(again, axis=0) for again in g.values()]).T for g in groups.values() if len(g) > 1
    ]
    return [(pair[0], pair[1]) for pair in columns]


def best_found(predicted: Floats, measured: Floats) -> bool:
    """Whether the row predicted fastest ran within 5% of the fastest."""
    return bool(measured[np.argmax(predicted)] >= (1 - BEST_WITHIN) * measured.max())


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one family: rows that could be predicted, and their errors.

    Errors are of counted rows; of all rows in a family without any (`counted` says which).
    """
    expressed = [outcome for outcome in outcomes if outcome.case]
    published = [outcome for outcome in expressed if outcome.case and outcome.case.is_counted]
    counted = published or expressed
    groups = comparable_groups(counted)
    best = [best_found(*group) for group in groups]
    reasons = Counter(outcome.reason for outcome in outcomes if not outcome.case)
    return {
        "rows": len(outcomes),
        "expressed": len(expressed),
        "not_expressed": dict(reasons.most_common()),
        "counted": bool(published),
        **errors_of(counted),
        "tau": kendall_tau(groups, TIED),
        "groups": len(groups),
        "best_within_5pct": sum(best) / len(best) if best else None,
        "sweeps": [tau for group in groups if (tau := _sweep_tau(group)) is not None],
    }


def _sweep_tau(group: tuple[Floats, Floats]) -> float | None:
    """Kendall's tau of one group with at least SWEEP layouts."""
    return kendall_tau([group], TIED) if len(group[0]) >= SWEEP else None


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors of time and memory."""
    time = [error for outcome in outcomes if (error := outcome.step_error) is not None]
    memory = [error for outcome in outcomes if (error := outcome.memory_error) is not None]
    return {"time": asdict(Errors.of(time)), "memory": asdict(Errors.of(memory))}


def summarize_families(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Figures of each family, in order of first occurrence."""
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        families[outcome.row.family].append(outcome)
    return {name: summarize(members) for name, members in families.items()}


def worst_rows(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """Gating rows with the largest error of time, worst first."""
    known = [outcome for outcome in outcomes if outcome.step_error is not None]
    counted = [outcome for outcome in known if outcome.case and outcome.case.is_counted]
    return sorted(counted or known, key=lambda outcome: -abs(outcome.step_error or 0.0))[:count]


@dataclass(frozen=True)
class Validation:
    """Predictions of published runs, and their errors."""

    outcomes: list[Outcome]
    """One per row of the tables."""
    left_out: bool = False
    """Whether the rates of each prediction were fitted without the row's source."""
    limits: Limits | None = None
    """Layouts that ran out of memory and layouts that ran, if they were asked for."""
    given: bool = False
    """Whether the rows are the caller's: intervals are those of plans, not from the other rows."""

    def __repr__(self) -> str:
        return f"Validation({len(self.outcomes)} rows, left_out={self.left_out})"

    @property
    def of_plans(self) -> bool:
        """Whether the intervals are those of plans."""
        return self.given and not self.left_out

    @cached_property
    def families(self) -> dict[str, dict[str, Any]]:
        """Figures of each family, in order of first occurrence."""
        return summarize_families(self.outcomes)

    @cached_property
    def totals(self) -> dict[str, dict[str, Any]]:
        """Errors of all counted rows, of dense models and of models with experts; whether intervals held."""
        counted = [outcome for outcome in self.outcomes if outcome.case and outcome.case.is_counted]
        experts = [bool(outcome.case and outcome.case.workload.model.num_experts) for outcome in counted]
        return {
            "all": errors_of(counted),
            "dense": errors_of([one for one, routed in zip(counted, experts, strict=True) if not routed]),
            "experts": errors_of([one for one, routed in zip(counted, experts, strict=True) if routed]),
            "interval": plan_interval_cover(counted) if self.of_plans else interval_cover(counted),
            "ranking": self._ranking(),
        }

    def _ranking(self) -> dict[str, Any]:
        """How many groups of layouts have a best that is found, and how many sweeps are ranked well."""
        groups = sum(family["groups"] for family in self.families.values())
        best = sum((family["best_within_5pct"] or 0) * family["groups"] for family in self.families.values())
        sweeps = [tau for family in self.families.values() for tau in family["sweeps"]]
        return {
            "groups": groups,
            "best_within_5pct": best / groups if groups else None,
            "sweeps": len(sweeps),
            "sweeps_tau_70": sum(tau >= WELL_RANKED for tau in sweeps),
            "least_tau": min(sweeps, default=None),
        }

    def worst(self, count: int) -> list[Outcome]:
        """Gating rows with the largest error of time, worst first."""
        return worst_rows(self.outcomes, count)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright validate --json``."""
        rows = [outcome.as_dict() for outcome in self.outcomes]
        return {
            "left_out": self.left_out,
            "families": self.families,
            "totals": self.totals,
            "out_of_memory": None if self.limits is None else self.limits.as_dict(),
            "rows": rows,
        }
