"""Fits a cluster's rates to measured steps (``meshwright tune``).

Regularised least squares: with r = log(predicted / measured time) and x = log(new / old rate), Gauss-Newton
steps minimize r² + RIDGE x². A rate that no measured step depends on does not change. The formulas stay:
costs that they leave out (such as launches of a block) end up in the rates, which then hold for this job
on this machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.plan.estimate.grid import Floats
from meshwright.plan.predict import predict
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout

RIDGE = 0.02
"""Cost of changing a rate by a factor e, over the cost of an error by that factor."""
ROUNDS = 25
SMALL = 1e-4
"""Step of the numerical derivative, in log space."""
HALVINGS = 12
"""How often a step is halved before the search stops."""
MOST_CHANGE = math.log(1000.0)
"""Limit on the change of a rate, in log space."""


@dataclass(frozen=True)
class MeasuredLayout:
    """A complete layout and the measured time of its step."""

    layout: Layout
    step_s: float


@dataclass(frozen=True)
class Calibration:
    """The cluster with new rates, and the errors before and after."""

    cluster: Cluster
    before: dict[str, float]
    after: dict[str, float]
    """The fitted rates."""
    error_before: float
    error_after: float
    """See :func:`mean_error`."""


def calibrate(job: Job, measured: Sequence[MeasuredLayout]) -> Calibration:
    """Fit the rates of the job's cluster to measured steps.

    Args:
        job: What ran.
        measured: At least one of its layouts.
    """
    keys = fitted_keys(job)
    old = np.array([getattr(job.cluster, key) for key in keys])

    def log_errors(x: Floats) -> Floats:
        return _log_errors(_with_rates(job, keys, old * np.exp(x)), measured)

    # Four digits, as in the file; no measurement is more precise.
    new = [float(f"{rate:.4g}") for rate in old * np.exp(_least_squares(log_errors, len(keys)))]
    cluster = _with_rates(job, keys, new).cluster
    return Calibration(
        cluster=cluster,
        before={key: float(value) for key, value in zip(keys, old, strict=True)},
        after=dict(zip(keys, new, strict=True)),
        error_before=mean_error(job, measured),
        error_after=mean_error(dataclasses.replace(job, cluster=cluster), measured),
    )


def fitted_keys(job: Job) -> tuple[str, ...]:
    """Cluster rates that a step on one machine depends on."""
    gemm_rate = "fp32_flops_per_s" if job.train.precision == "fp32" else "bf16_flops_per_s"
    return (gemm_rate, "memory_bytes_per_s", "link_bytes_per_s", "link_latency_s")


def mean_error(job: Job, measured: Sequence[MeasuredLayout]) -> float:
    """Mean error of the predictions as a factor minus 1: 0.5 is 50% too long, or a third too short."""
    return math.expm1(float(np.abs(_log_errors(job, measured)).mean()))


def _with_rates(job: Job, keys: Sequence[str], values: Iterable[float]) -> Job:
    rates: dict[str, Any] = {key: float(value) for key, value in zip(keys, values, strict=True)}
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, **rates))


def _log_errors(job: Job, measured: Sequence[MeasuredLayout]) -> Floats:
    """log(predicted / measured) of each layout."""
    predicted = [predict(job, t.layout).step_s for t in measured]
    return np.asarray(np.log(predicted) - np.log([t.step_s for t in measured]), dtype=np.float64)


def _least_squares(log_errors: Callable[[Floats], Floats], unknowns: int) -> Floats:
    """The changes x that minimize errors² + RIDGE x²; never worse than no change."""

    def cost(x: Floats) -> float:
        return float((log_errors(x) ** 2).sum() + RIDGE * (x**2).sum())

    x = np.zeros(unknowns)
    for _ in range(ROUNDS):
        here = log_errors(x)
        slopes = np.stack(
            [(log_errors(x + SMALL * unit) - here) / SMALL for unit in np.eye(unknowns)], axis=1
        )
        step = np.linalg.solve(slopes.T @ slopes + RIDGE * np.eye(unknowns), -slopes.T @ here - RIDGE * x)
        lengths = (0.5**power for power in range(HALVINGS))
        tries = (np.clip(x + length * step, -MOST_CHANGE, MOST_CHANGE) for length in lengths)
        better = next((tried for tried in tries if cost(tried) < cost(x)), None)
        if better is None or np.abs(better - x).max() < SMALL:
            return x if better is None else better
        x = better
    return x
