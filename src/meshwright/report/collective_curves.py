"""Measured collectives: rows, bus bandwidth, a fitted latency and bandwidth per curve, and a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.figure import COLORS, add_axes, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOTED_WHOLE = ("broadcast", "reduce")
"""Operations that move the whole tensor over the slowest link once."""
WIDTH, HEIGHT = 920, 300
"""Size of a row of the picture, in pixels."""
GIGA = 1e9
UNKNOWNS = 2
"""Latency and bandwidth: so many sizes are fitted exactly."""


def bus_factor(op: str, ranks: int) -> float:
    """Bytes that cross each link of a ring, over the bytes of the tensor: as nccl-tests define it."""
    if op in ROOTED_WHOLE:
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


@dataclass(frozen=True)
class CollectiveRow:
    """One size of a curve."""

    op: str
    algorithm: str
    """``backend`` is the one of the transport."""
    transport: str
    """``gloo``, ``shm`` or ``nccl``."""
    ranks: int
    bytes: int
    """The larger of input and output tensor, on one rank."""
    time_s: float
    """Median over the rounds, of the slowest rank."""
    uncontended_s: float
    """``time_s`` minus run-queue wait (schedstat), in the rounds with the least wait."""
    rounds: int

    @property
    def busbw_bytes_per_s(self) -> float:
        """Bandwidth of each link, if it were a ring."""
        return self.bytes * bus_factor(self.op, self.ranks) / self.time_s

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return vars(self) | {"busbw_bytes_per_s": self.busbw_bytes_per_s}


@dataclass(frozen=True)
class CollectiveCurve:
    """All sizes of an operation, an algorithm and a transport; ``time = alpha + bytes * beta``."""

    rows: tuple[CollectiveRow, ...]
    alpha_s: float | None
    """Time of a call without bytes; None for fewer than two sizes."""
    beta_s_per_byte: float | None

    @classmethod
    def of(cls, rows: Sequence[CollectiveRow]) -> CollectiveCurve:
        """Fit a curve."""
        found = fit_line([row.bytes for row in rows], [row.time_s for row in rows])
        return cls(tuple(rows), *(found or (None, None)))

    def fit_uncontended(self) -> tuple[float, float] | None:
        """Latency and time per byte of the uncontended times; None for one size."""
        return fit_line([row.bytes for row in self.rows], [row.uncontended_s for row in self.rows])

    @property
    def name(self) -> str:
        """In the picture and in tables."""
        first = self.rows[0]
        return f"{first.algorithm}, {first.transport}"

    @property
    def worst_error(self) -> float | None:
        """The largest relative error of the fit; None for two sizes, which a line fits exactly."""
        alpha_s, beta = self.alpha_s, self.beta_s_per_byte
        if alpha_s is None or beta is None or len(self.rows) <= UNKNOWNS:
            return None
        return max(abs((alpha_s + row.bytes * beta) / row.time_s - 1) for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        first = self.rows[0]
        return {
            "op": first.op,
            "algorithm": first.algorithm,
            "transport": first.transport,
            "ranks": first.ranks,
            "alpha_s": self.alpha_s,
            "beta_s_per_byte": self.beta_s_per_byte,
            "worst_error": self.worst_error,
        }


def list_curves(rows: Iterable[CollectiveRow]) -> list[CollectiveCurve]:
    """The curves, in the order of their first rows."""
    found: dict[tuple[str, str, str], list[CollectiveRow]] = {}
    for row in rows:
        found.setdefault((row.op, row.algorithm, row.transport), []).append(row)
    return [CollectiveCurve.of(curve) for curve in found.values()]


def fit_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float] | None:
    """Latency and time per byte, neither negative: least squares of relative errors. None for one size."""
    if len(set(sizes)) < 2:
        return None
    scale = 1 / np.array(times)
    columns = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1) * scale[:, None]
    both = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    single = [float(column.sum() / (column**2).sum()) for column in columns.T]
    misses = [((column * value - 1) ** 2).sum() for column, value in zip(columns.T, single, strict=True)]
    return (single[0], 0.0) if misses[0] < misses[1] else (0.0, single[1])


def draw_curves(curves: Sequence[CollectiveCurve], note: str) -> Figure:
    """One row per operation: time with the fitted lines, and bus bandwidth, over the size."""
    ops = list(dict.fromkeys(curve.rows[0].op for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    with style():
        figure = new_figure(WIDTH, HEIGHT * len(ops) + 30)
        for number, op in enumerate(ops):
            top = 30 + HEIGHT * number + 30
            bottom = HEIGHT * (len(ops) - 1 - number) + 44
            left = add_axes(figure, left=70, top=top, right=WIDTH / 2 + 14, bottom=bottom)
            right = add_axes(figure, left=WIDTH / 2 + 56, top=top, right=14, bottom=bottom)
            for curve in curves:
                if curve.rows[0].op == op:
                    _draw_curve(left, right, curve, COLORS[names.index(curve.name) % len(COLORS)])
            _label(left, f"{op}: time (lines: fitted)", "", log_y=True)
            _label(right, f"{op}: bus bandwidth", "GB/s", log_y=False)
            right.legend(loc="upper left")
        figure.text(70 / WIDTH, 1 - 16 / (HEIGHT * len(ops) + 30), note, fontsize=7.5)
    return figure


def _draw_curve(times: Axes, bandwidth: Axes, curve: CollectiveCurve, color: str) -> None:
    sizes = [row.bytes for row in curve.rows]
    times.plot(sizes, [row.time_s for row in curve.rows], "o", color=color, markersize=3.5)
    if curve.alpha_s is not None and curve.beta_s_per_byte is not None:
        fitted = [curve.alpha_s + size * curve.beta_s_per_byte for size in sizes]
        times.plot(sizes, fitted, "-", color=color, linewidth=1.0)
    rates = [row.busbw_bytes_per_s / GIGA for row in curve.rows]
    bandwidth.plot(sizes, rates, "-o", color=color, markersize=3, label=curve.name)


def _label_minor(axes: Axes, value: float) -> str:
    """The time at a minor tick, 2 and 5 of a decade, if the axis has no more than one major tick."""
    low, high = axes.get_ylim()
    majors = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
    first_digit = round(value / 10 ** math.floor(math.log10(value) + 1e-9))
    return format_seconds(value) if majors < 2 and first_digit in (2, 5) else ""


def _label(axes: Axes, title: str, unit: str, log_y: bool) -> None:
    axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: format_seconds(value))
        # With less than a decade matplotlib labels minor ticks, too: in TeX, and wider than the margin.
        axes.yaxis.set_minor_formatter(lambda value, _: _label_minor(axes, value))
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.grid(axis="y")
