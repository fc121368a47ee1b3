"""How long a training takes with failures: ``plan --tokens`` sizes clusters with it.

It is a small simulation of the same failure model as ``simulate failures``: about as many failures for every
size, so that it is fast enough for all sizes that the planner tries. Failed nodes are replaced at once: how
many spare nodes that takes is the question of ``simulate failures``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from meshwright.layout.checkpoint_interval import expected_goodput
from meshwright.plan.sizing import RunLength
from meshwright.simulate.failures import FailureModel
from meshwright.simulate.job_model import DAY_S, build_model
from meshwright.simulate.outcomes import simulate
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job

FAILURES = 20_000
"""Failures of all runs together: 5 to 30 ms."""
FEWEST_RUNS, MOST_RUNS = 40, 2000
LEAST_GOODPUT = 1e-3
"""Below it a run makes no progress."""
MANY_SPARES = 1_000_000


def simulate_run_length(job: Job, train_s: float) -> RunLength:
    """Mean length of a training, and the range that 90% of the simulated runs are in.

    Args:
        job: On the whole of its cluster.
        train_s: Length without checkpoints and failures.
    """
    settings = FailureSettings(replan=False)  # failed nodes are replaced
    model, _ = build_model(job, train_s / DAY_S, settings)
    restore_s = model.detect_s + model.restart_s + model.load_s
    goodput = expected_goodput(model.interval_s, model.save_s, model.mtbf_s, restore_s)
    if goodput < LEAST_GOODPUT:
        return RunLength(math.inf, math.inf, math.inf, 1.0)
    wall_s = train_s / goodput  # the spread is that of runs of about this length
    model, _ = build_model(job, wall_s / DAY_S, settings)
    found = simulate(_with_replacement(model), _count_runs(model), seed=0).goodput
    low, mean, high = np.quantile(found, 0.05), found.mean(), np.quantile(found, 0.95)
    if mean < LEAST_GOODPUT:
        return RunLength(math.inf, math.inf, math.inf, 1.0)
    longest_s = train_s / low if low > 0 else math.inf
    return RunLength(float(train_s / mean), float(train_s / high), float(longest_s), float(1 - mean))


def _with_replacement(model: FailureModel) -> FailureModel:
    """Every failed node has a spare; none is repaired."""
    return dataclasses.replace(model, spares=MANY_SPARES, repair_s=model.wall_s)


def _count_runs(model: FailureModel) -> int:
    return int(np.clip(FAILURES / (model.expected + 1), FEWEST_RUNS, MOST_RUNS))
