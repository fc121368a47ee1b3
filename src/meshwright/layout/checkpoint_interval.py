"""The interval between checkpoints that loses the least time: mean time between failures, Young, Daly.

A failure loses the work since the last checkpoint, and every checkpoint costs time. Young (1974) minimizes
the sum to first order; Daly (2006) refines it for frequent failures. ``checkpoint.auto`` saves by it, and the
simulator of failures (``simulate``) starts from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.core.units import format_plural, format_seconds
from meshwright.spec.cluster import Cluster

TYPICAL_FAILURES = 4.0
"""Failures per 1,000 node-days, if the cluster has no ``failure_hours``.

Of nodes with 8 GPUs: Llama 3 had 3.8 (419 unexpected interruptions of 16,384 GPUs in 54 days), Meta's
research clusters 2.3 and 6.5, BLOOM about 3.
"""
NODE_HOURS = 24_000.0
"""In 1,000 node-days."""

MOST_EXPONENT = 700.0
"""Largest power of e that a float holds."""


@dataclass(frozen=True)
class FailureRate:
    """How often a device, node or link of a run fails."""

    mtbf_s: float
    """Mean time between failures of the whole run."""
    devices: str
    """Its scope, such as ``16 devices``."""
    basis: str
    """Where the figure is from."""


def failure_rate(cluster: Cluster, devices: int) -> FailureRate:
    """The failure rate of a run on some devices of a cluster."""
    if cluster.failure_hours is not None:
        mtbf_s = cluster.failure_hours * 3600 / devices
        basis = f"cluster.failure_hours={cluster.failure_hours:g} per device"
        return FailureRate(mtbf_s, format_plural(devices, "device"), basis)
    nodes = math.ceil(devices / cluster.devices_per_node)
    basis = f"assumed: {TYPICAL_FAILURES:g} failures per 1,000 node-days; set cluster.failure_hours"
    return FailureRate(NODE_HOURS / TYPICAL_FAILURES * 3600 / nodes, format_plural(nodes, "node"), basis)


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Young's interval between checkpoints, sqrt(2 cost M)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval: the time of computation between the end of a save and the start of the next one.

    sqrt(2 d M) [1 + 1/3 sqrt(d / 2M) + 1/9 (d / 2M)] - d for d < 2M, else M (Daly 2006, equation 37).

    Args:
        cost_s: d, what a save costs.
        mtbf_s: M, mean time between failures.
    """
    ratio = cost_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def lost_share(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Share of time lost to saves, repeated work and restarts; 1 where no progress is possible."""
    return min(1.0, cost_s / interval_s + interval_s / (2 * mtbf_s) + restart_s / mtbf_s)


def expected_goodput(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected share of useful time if failures can also hit saves and restarts.

    interval / (M e^(R/M) (e^((interval + d) / M) - 1)) (Daly 2006, complete model). The simulator has the
    same mean where no node is missing.
    """
    cycles = (interval_s + cost_s) / mtbf_s
    if restart_s / mtbf_s + cycles > MOST_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(cycles))


@dataclass(frozen=True)
class SaveCost:
    """The time that a save costs training."""

    blocked_s: float
    """Training waits for it."""
    slowed_s: float
    """Steps take longer while it is written: the sum of what they take longer."""
    commit_s: float
    """From the start of the write to the commit."""

    @property
    def cost_s(self) -> float:
        """The time that training loses; the interval is computed from it."""
        return self.blocked_s + self.slowed_s


@dataclass(frozen=True)
class IntervalChoice:
    """The interval of ``checkpoint.auto``, and why."""

    interval_s: float
    cost: SaveCost
    failures: FailureRate

    def sentence(self) -> str:
        """The choice with its figures."""
        blocked, slowed = format_seconds(self.cost.blocked_s), format_seconds(self.cost.slowed_s)
        cost = (
            f"a save costs {format_seconds(self.cost.cost_s)} ({blocked} blocked, {slowed} by slower steps)"
        )
        between = f"the mean time between failures of {self.failures.devices} is"
        reason = f"{cost}, and {between} {format_seconds(self.failures.mtbf_s)} ({self.failures.basis})"
        if self.interval_s > daly_interval_s(self.cost.cost_s, self.failures.mtbf_s):
            commit = format_seconds(self.cost.commit_s)
            reason = f"a save takes {commit} until its commit, longer than the best interval: {reason}"
        return f"a checkpoint every {format_seconds(self.interval_s)}: {reason}"


def choose_interval(cost: SaveCost, failures: FailureRate) -> IntervalChoice:
    """Daly's interval, but never shorter than a save takes to commit."""
    best_s = daly_interval_s(cost.cost_s, failures.mtbf_s)
    return IntervalChoice(max(best_s, cost.commit_s), cost, failures)
