"""Fits the rates of ``plan/time/calibration.toml`` to runs: robust least squares in log space.

With r = log(predicted / measured) and x = log(rate / prior), Gauss-Newton steps minimize the sum of Huber's
loss of r, weighted by source, plus (x / SPREAD)². A rate that fewer than FEWEST_ROWS rows depend on keeps its
prior, and so does a rate of a kernel class that only one source depends on. Many sets of rates are evaluated
together: each is one more copy of every layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.rates import Rates, Tables, calibrated_device
from meshwright.validation.published import Case

PRIORS: Tables = {
    "default": {
        "matmul": 0.87,
        "headroom": 1.0,
        "matmul_fp8": 0.8,
        "matmul_fp4": 0.55,
        "block_scaled": 0.95,
        "row_scaled": 0.94,
        "expert_matmul": 0.9,
        "attention": 0.75,
        "flash_2": 1.0,
        "flash_1": 0.6,
        "attention_ramp": 250.0,
        "memory": 0.85,
        "elementwise": 1.0,
        "operand_traffic": 1.0,
        "launch_s": 5e-6,
        "cpu_launch_s": 4e-4,
        "expert_cpu_launch_s": 2e-3,
        "link": 0.8,
        # NCCL's all-reduce on 2 to 8 A100s (published curves): 45 to 75 microseconds; 229 of 300 GB/s.
        # The presets of GPUs have 20 microseconds within a node and 40 between nodes.
        "link_latency": 1.75,
        "nic": 0.8,
        "nic_latency": 0.25,
        "overlap": 0.7,
        # FSDP prefetches: compute hides all but the first and the last collectives of a pass.
        "fsdp_window": 1.0,
        "fsdp_exposed": 0.2,
        "tp_overlap": 0.5,
        # DeepSeek-V3's report: dispatch and combine are hidden, but for the start and the end of a pass.
        "ep_overlap": 0.9,
        "all_to_all": 0.7,
        "contention": 0.05,
    },
    "device.A100": {"matmul": 0.92, "attention": 0.7, "link": 0.76},
    "device.V100": {"matmul": 0.9, "link": 0.89},
    # Measured on one H200 (benchmarks/kernel_curves.py, 18 November 2026): large GEMMs at the power limit 676
    # TFLOP/s, fp8 1255, cuDNN's attention 639 (head size 128), FlashAttention-2 348. In profiles of whole
    # steps, torch's grouped GEMMs: 685 TFLOP/s (16 experts, width 2048), 622 (64 experts, width 1408).
    "device.H200": {
        "matmul": 0.87,
        "headroom": 1.45,
        "attention": 0.8,
        "flash_2": 0.55,
        "expert_matmul": 1.0,
    },
    "device.H100": {"matmul": 0.87, "headroom": 1.45, "attention": 0.8, "flash_2": 0.55},
    # A GH200 of JUPITER has 680 W for CPU and GPU, an H100 700 W of its own: 0.8 of its clock. Its CPU takes
    # 1.4 times as long for launches (5.9 and 4.3 ms for a layer of Megatron-Core that waits for them).
    "device.GH200": {
        "matmul": 0.7,
        "headroom": 1.45,
        "attention": 0.65,
        "flash_2": 0.45,
        "cpu_launch_s": 5.6e-4,
    },
    # B200 and GB200 lower their clocks under load. B300, with a higher power limit, has the H200's share of
    # its peak. FlashAttention-2 is no faster than on Hopper: it uses the tensor-core instructions of Ampere.
    "device.B200": {"matmul": 0.7, "headroom": 1.45, "attention": 0.6, "flash_2": 0.35},
    "device.GB200": {"matmul": 0.7, "headroom": 1.45, "attention": 0.6, "flash_2": 0.35},
    "device.B300": {"matmul": 0.87, "headroom": 1.45, "attention": 0.6, "flash_2": 0.35},
    # CPUs: set by hand on five small models on a 2-core Xeon virtual machine (November 2026), not fitted.
    "device.cpu": {
        "matmul": 0.8,
        "expert_matmul": 1.0,
        "memory": 1.0,
        "cpu_launch_s": 5e-4,
        "expert_cpu_launch_s": 0.0,
        "link": 1.0,
        "link_latency": 1.0,
        "nic": 1.0,
        "nic_latency": 1.0,
        "overlap": 0.5,
        "fsdp_window": 0.5,
        "fsdp_exposed": 0.5,
        "all_to_all": 1.0,
        "contention": 0.0,
    },
}
"""Rates before any fit, from data sheets and published kernel benchmarks; the H200's from our own kernel
timings and profiles, the CPU's set by hand."""
FITTED: tuple[tuple[str, str], ...] = tuple(
    (section, name)
    for section, names in (
        ("default", "matmul_fp8 matmul_fp4 expert_matmul flash_1 elementwise operand_traffic cpu_launch_s"),
        ("default", "expert_cpu_launch_s nic overlap fsdp_exposed tp_overlap all_to_all nic_latency"),
        ("device.A100", "matmul attention link"),
        ("device.H100", "matmul attention"),
        ("device.GH200", "matmul"),
        ("device.B200", "matmul"),
        ("device.GB200", "matmul"),
        ("device.B300", "matmul matmul_fp8"),
    )
    for name in names.split()
)
"""The rates that are fitted; the others are priors."""
BOUNDS = {
    "matmul": (0.3, 1.05),
    "matmul_fp8": (0.3, 1.5),
    "matmul_fp4": (0.2, 1.05),
    "expert_matmul": (0.2, 1.2),
    "attention": (0.2, 1.05),
    "flash_1": (0.2, 1.05),
    "elementwise": (0.3, 4.0),
    "operand_traffic": (0.05, 3.0),
    "cpu_launch_s": (5e-5, 3e-3),
    "expert_cpu_launch_s": (5e-5, 1e-2),
    "link": (0.3, 1.0),
    "nic": (0.2, 1.0),
    "overlap": (0.1, 0.99),
    "fsdp_exposed": (0.01, 0.9),
    "tp_overlap": (0.05, 0.95),
    "all_to_all": (0.1, 1.2),
    "nic_latency": (0.02, 2.0),
}
"""A fitted rate on its bound is a mistake; a test checks that none is."""
SPREAD = 0.25
"""Standard deviation of a rate around its prior, in log space."""
HUBER = 0.1
"""Errors beyond this count linearly."""
NOISE = 0.1
"""Error of a row that is as unlikely as a rate SPREAD away from its prior."""
ROUNDS = 4
SMALL = 0.01
"""Step of the numerical derivative, in log space."""
SENSITIVE = 0.02
"""Least share of a rate in a row's time for the row to count towards FEWEST_ROWS."""
FEWEST_ROWS, FEWEST_SOURCES = 10, 2
UNCOUNTED_WEIGHT = 0.3
"""Weight of rows that do not count in the figures."""
MOST_COPIES = 64
"""Sets of rates that are evaluated at once."""


class Runs:
    """Measured runs, grouped by workload."""

    def __init__(self, cases: Sequence[Case]) -> None:
        together: dict[Workload, list[Case]] = defaultdict(list)
        for case in cases:
            if case.step_s:
                together[case.workload].append(case)
        self.groups = [(work, Grid.of([c.layout for c in group]), group) for work, group in together.items()]
        self.cases = [case for *_, group in self.groups for case in group]
        self.sources = np.array([case.source for case in self.cases])
        counts = Counter(case.source for case in self.cases)
        self.weights: Floats = np.array(
            [
                (1.0 if case.is_counted else UNCOUNTED_WEIGHT) / math.sqrt(counts[case.source])
                for case in self.cases
            ]
        )
        self.measured: Floats = np.array([case.step_s or math.nan for case in self.cases])

    def log_errors(self, rates: Sequence[Tables]) -> Floats:
        """log(predicted / measured) of every run under every set of rates: sets x runs."""
        parts = [
            np.concatenate(
                [_step_s(work, grid, rates[start : start + MOST_COPIES])
                 for start in range(0, len(rates), MOST_COPIES)]
            )
            for work, grid, _ in self.groups
        ]  # fmt: skip
        found: Floats = np.log(np.concatenate(parts, axis=1) / self.measured)
        return found


def _step_s(workload: Workload, grid: Grid, sets: Sequence[Tables]) -> Floats:
    """Predicted step of each layout under each set of rates: sets x layouts."""
    device = f"device.{calibrated_device(workload.cluster.device_name)}"
    merged = [tables["default"] | tables.get(device, {}) for tables in sets]
    values: dict[str, Any] = {
        field.name: np.repeat([one[field.name] for one in merged], len(grid))
        for field in dataclasses.fields(Rates)
    }
    copies = grid.take(np.tile(np.arange(len(grid)), len(sets)))
    return estimate_step(workload, copies, Rates(**values)).step_s.reshape(len(sets), len(grid))


def with_changes(changes: Floats, base: Tables = PRIORS) -> Tables:
    """The rates after a change of the fitted ones, in log space."""
    tables = {section: dict(values) for section, values in base.items()}
    for (section, name), change in zip(FITTED, changes, strict=True):
        start = tables.get(section, {}).get(name, tables["default"][name])
        low, high = BOUNDS[name]
        tables.setdefault(section, {})[name] = float(np.clip(start * math.exp(change), low, high))
    return tables


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted rates, as changes of the priors in log space."""

    changes: Floats
    rows: Mapping[tuple[str, str], int]
    """How many rows depend on each rate."""

    @property
    def tables(self) -> Tables:
        """The rates."""
        return with_changes(self.changes)


def fit(runs: Runs) -> Fit:
    """Fit the rates to all runs."""
    return fit_without(runs, [""])[""]


def fit_without(runs: Runs, sources: Sequence[str]) -> dict[str, Fit]:
    """Fit the rates once for each source, to the runs of all other sources."""
    unknowns = len(FITTED)
    changes = np.zeros((len(sources), unknowns))
    slopes = _slopes(runs, np.zeros(unknowns))
    kept = [runs.sources != source for source in sources]
    sensitive = np.abs(slopes) > SENSITIVE
    counts = [dict(zip(FITTED, sensitive[:, keep].sum(axis=1).tolist(), strict=True)) for keep in kept]
    free = [_fittable(sensitive[:, keep], runs.sources[keep]) for keep in kept]
    for round_ in range(ROUNDS):
        errors = runs.log_errors([with_changes(change) for change in changes])
        for index, keep in enumerate(kept):
            step = _solve(
                slopes[:, keep], errors[index, keep], runs.weights[keep], changes[index], free[index]
            )
            changes[index] = changes[index] + step
        if round_ == 0:
            slopes = _slopes(runs, changes.mean(axis=0))
    return {source: Fit(changes[index].copy(), counts[index]) for index, source in enumerate(sources)}


def _fittable(sensitive: Flags, sources: Floats) -> Flags:
    """Rates that enough rows depend on; those of kernel classes need rows of two sources."""
    found = []
    for (section, _), rows in zip(FITTED, sensitive, strict=True):
        least = FEWEST_SOURCES if section == "default" else 1
        found.append(int(rows.sum()) >= FEWEST_ROWS and len(set(sources[rows].tolist())) >= least)
    return np.array(found)


def _slopes(runs: Runs, around: Floats) -> Floats:
    """Derivative of every run's log error by every rate: rates x runs."""
    points = [around, *(around + SMALL * unit for unit in np.eye(len(FITTED)))]
    errors = runs.log_errors([with_changes(point) for point in points])
    slopes: Floats = (errors[1:] - errors[0]) / SMALL
    return slopes


def _solve(slopes: Floats, errors: Floats, weights: Floats, change: Floats, free: Flags) -> Floats:
    """One regularised, reweighted Gauss-Newton step; rates that are not free stay at their priors."""
    robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9))
    left = (slopes * robust) @ slopes.T
    ridge = (NOISE / SPREAD) ** 2 * np.eye(len(FITTED))
    step = np.linalg.solve(left + ridge, -(slopes * robust) @ errors - ridge @ change)
    return np.where(free, step, -change)
