"""Published NCCL all-reduce curves against simulated rings.

Three figures are fitted per machine, on 2, 4 and 8 ranks: the launch of a collective, the latency per step
and the bandwidth of a ring. The other numbers of ranks are predicted by simulating the ring all-reduce and
judged from 1 MB. Curves of one number of ranks cannot be judged so, nor rows without a size. The choice of
algorithm is judged only where the source states it, among the two that NCCL has: ring and tree.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any

import numpy as np

from meshwright.schedule.collective.build import build_collective
from meshwright.schedule.collective.proof import prove_collective
from meshwright.schedule.collective.steps import CollectiveSchedule
from meshwright.schedule.collective.traffic import count_traffic
from meshwright.simulate.collective import simulate_collective
from meshwright.simulate.collective_choice import EQUAL, compare_algorithms
from meshwright.simulate.collective_links import build_uniform_links
from meshwright.spec.load import load_job
from meshwright.validation.nvlink import count_rings

TABLE = "tables/collective_curves.csv"
FIT_RANKS = (2, 4, 8)
"""Numbers of ranks that the figures are fitted on; the others are held out."""
LEAST_BYTES = 1_000_000
"""Smaller tensors are not judged."""
MESHES = {"V100 (NVLink2)": count_rings}
"""Machines without a switch: rings by number of GPUs. The others have a switch, and one bandwidth."""
STATED = (
    ("NVIDIA/nccl-tests#232", "H100, 1 GPU per node, 4 NICs, Tree", "tree", "2x1xh100-sxm"),
    ("NVIDIA GTC24 S62129 slide (in stas00/ml-engineering)", "H100 NVLink4 ring", "ring", "1x8xh100-sxm"),
)
"""Source and hardware whose algorithm is stated, and the cluster to simulate."""
LARGE_BYTES = 2**30
"""The size of rows that say "large"."""


@dataclass(frozen=True)
class Point:
    """One published time."""

    hardware: str
    ranks: int
    size_bytes: int
    time_s: float


@dataclass(frozen=True)
class RingFit:
    """The figures of a machine."""

    launch_s: float
    alpha_s: float
    """Per step."""
    bytes_per_s: float
    """Bandwidth of one ring."""

    def predict_s(self, point: Point) -> float:
        """Simulate the ring all-reduce of a point."""
        width = self.bytes_per_s * rings_of(point)
        links = build_uniform_links(point.ranks, self.alpha_s, width, launch_s=self.launch_s)
        return simulate_collective(_ring(point.ranks)[1], point.size_bytes, links).time_s


@dataclass(frozen=True)
class CurveOutcome:
    """A machine: its figures, and the errors on the held-out numbers of ranks."""

    hardware: str
    fit: RingFit
    rows: tuple[tuple[Point, float], ...]
    """Points with their predicted times, fitted ones included."""
    not_expressed: tuple[int, ...]
    """Numbers of ranks without a ring of links."""

    def errors(self, held_out: bool) -> list[float]:
        """Predicted over published less one, of the rows that are held out, or fitted."""
        return [
            predicted / point.time_s - 1
            for point, predicted in self.rows
            if (point.ranks not in FIT_RANKS) == held_out
        ]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "hardware": self.hardware,
            "launch_s": self.fit.launch_s,
            "alpha_s": self.fit.alpha_s,
            "ring_bytes_per_s": self.fit.bytes_per_s,
            "fitted": summarize_errors(self.errors(held_out=False)),
            "held_out": summarize_errors(self.errors(held_out=True)),
            "any_split": judge_splits([point for point, _ in self.rows]),
            "not_expressed_ranks": list(self.not_expressed),
            "rows": [vars(point) | {"predicted_s": predicted} for point, predicted in self.rows],
        }


@dataclass(frozen=True)
class Choice:
    """The algorithm of a source, and the one that the simulation finds faster."""

    source: str
    ranks: int
    size_bytes: int
    stated: str
    simulated: str
    """``either`` if both take the same time."""
    times_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return vars(self) | {"agrees": self.simulated in (self.stated, "either")}


@dataclass(frozen=True)
class CollectiveValidation:
    """All curves and choices."""

    curves: tuple[CurveOutcome, ...]
    choices: tuple[Choice, ...]
    not_judged: dict[str, int]
    """Rows of the table that are not judged, by reason."""

    def __repr__(self) -> str:
        return f"CollectiveValidation({len(self.curves)} curves, {len(self.choices)} choices)"

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright validate --collectives --json``."""
        held_out = [error for curve in self.curves for error in curve.errors(held_out=True)]
        return {
            "held_out": summarize_errors(held_out),
            "curves": [curve.as_dict() for curve in self.curves],
            "choices": [choice.as_dict() for choice in self.choices],
            "not_judged": self.not_judged,
        }


def summarize_errors(errors: Sequence[float]) -> dict[str, float | int | None]:
    """Number of rows, mean absolute error, bias, worst, and the share within 20%."""
    if not errors:
        return {"rows": 0, "mape": None, "bias": None, "worst": None, "within_20pct": None}
    sizes = np.abs(errors)
    return {
        "rows": len(errors),
        "mape": float(sizes.mean()),
        "bias": float(np.mean(errors)),
        "worst": float(sizes.max()),
        "within_20pct": float((sizes <= 0.2).mean()),
    }


def validate_curves() -> CollectiveValidation:
    """Fit and judge the curves of the package's table."""
    with (resources.files("meshwright.validation") / TABLE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points, reasons = _read_points(rows)
    curves = []
    for hardware, found in points.items():
        usable = [point for point in found if rings_of(point)]
        fit = fit_ring([point for point in usable if point.ranks in FIT_RANKS])
        predicted = tuple((point, fit.predict_s(point)) for point in usable)
        without = tuple(sorted({point.ranks for point in found} - {point.ranks for point in usable}))
        curves.append(CurveOutcome(hardware, fit, predicted, without))
    return CollectiveValidation(tuple(curves), tuple(_judge_choices(rows)), reasons)


def rings_of(point: Point) -> int:
    """Rings at the same time; 1 with a switch."""
    return MESHES[point.hardware](point.ranks) if point.hardware in MESHES else 1


def fit_ring(points: Sequence[Point]) -> RingFit:
    """Least squares of relative errors; a figure that would be negative is left out."""
    times = np.array([point.time_s for point in points])
    matrix = np.array([_features(point) for point in points]) / times[:, None]
    columns = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(times)), rcond=None)
        if found.min() >= 0:
            break
        columns.pop(int(found.argmin()))
    launch_s, alpha_s, beta = (
        float(found[columns.index(index)]) if index in columns else 0.0 for index in range(3)
    )
    return RingFit(launch_s, alpha_s, 1 / beta)


def _features(point: Point) -> tuple[float, float, float]:
    """What the three figures are multiplied with: launches, steps, and bytes through a ring."""
    steps, schedule = _ring(point.ranks)
    return 1.0, steps, count_traffic(schedule, point.size_bytes).most / rings_of(point)


@cache
def _ring(ranks: int) -> tuple[int, CollectiveSchedule]:
    """Steps and schedule of a ring all-reduce."""
    schedule = build_collective("all_reduce", "ring", ranks)
    return prove_collective(schedule).steps, schedule


def judge_splits(points: Sequence[Point]) -> dict[str, float | int]:
    """The held-out errors if any three numbers of ranks are fitted: how much the choice of them matters."""
    means, worst = [], 0.0
    for chosen in combinations(sorted({point.ranks for point in points}), len(FIT_RANKS)):
        fit = fit_ring([point for point in points if point.ranks in chosen])
        figures = np.array([fit.launch_s, fit.alpha_s, 1 / fit.bytes_per_s])
        rest = [point for point in points if point.ranks not in chosen]
        errors = [abs(float(figures @ _features(point)) / point.time_s - 1) for point in rest]
        means.append(sum(errors) / len(errors))
        worst = max(worst, *errors)
    return {"splits": len(means), "least_mape": min(means), "most_mape": max(means), "worst": worst}


def _read_points(rows: Sequence[dict[str, str]]) -> tuple[dict[str, list[Point]], dict[str, int]]:
    """The curves over several numbers of ranks, and the rows that are not judged, by reason."""
    reasons: dict[str, int] = defaultdict(int)
    found: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        if row["collective"] != "all_reduce":
            reasons["another operation"] += 1
        elif not row["size_bytes"].isdigit():
            reasons["no size"] += 1
        elif int(row["size_bytes"]) < LEAST_BYTES:
            reasons["below 1 MB"] += 1
        else:
            ranks, size = int(row["num_gpus"]), int(row["size_bytes"])
            found[row["hardware"]].append(Point(row["hardware"], ranks, size, _read_time_s(row)))
    for hardware, points in list(found.items()):
        if len({point.ranks for point in points}) == 1:
            reasons["one number of ranks"] += len(found.pop(hardware))
    return dict(found), dict(reasons)


def _read_time_s(row: dict[str, str]) -> float:
    """The published time, or the one that the published bus bandwidth (as nccl-tests define it) implies."""
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    ranks = int(row["num_gpus"])
    return 2 * (ranks - 1) / ranks * int(row["size_bytes"]) / (float(row["busbw_GBps"]) * 1e9)


def _judge_choices(rows: Sequence[dict[str, str]]) -> list[Choice]:
    choices = []
    for source, hardware, stated, on in STATED:
        cluster = load_job("demo-2m", on=on, to_run=False).cluster
        for row in rows:
            if (row["source"], row["hardware"]) != (source, hardware):
                continue
            ranks = int(row["num_gpus"])
            size = int(row["size_bytes"]) if row["size_bytes"].isdigit() else LARGE_BYTES
            compared = compare_algorithms("all_reduce", cluster, [ranks], [size], ["ring", "double_tree"])
            names = {"ring": "ring", "double_tree": "tree"}
            times = {names[found.algorithm]: found.time_s for found in compared.rows}
            least, most = min(times.values()), max(times.values())
            same = most <= least * (1 + EQUAL)
            simulated = "either" if same else names[compared.fastest(ranks, size).algorithm]
            choices.append(Choice(source, ranks, size, stated, simulated, times))
    return choices
