"""Line charts: the data of a chart, and its figure.

A chart is data. It is drawn here through matplotlib, and in ``text_plot.py`` with braille dots for terminals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.report.figure import COLORS, INK, add_axes, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

MAX_POINTS = 1000
"""A longer line is thinned, drawn faint, with its running medians on top."""
MAX_MARKERS = 40
"""A longer line has no dots."""
MAX_MARK_LABELS = 6
"""With more marks than this, marks have no labels."""
MEDIANS = 180
"""Points of the line of medians."""


@dataclass(frozen=True)
class Series:
    """One line. A value that is not finite breaks it. Segments are attempts at the same run."""

    name: str
    segments: tuple[tuple[Point, ...], ...]
    style: int = 0
    """Index of its colour."""
    dashed: bool = False

    def points(self) -> Iterator[Point]:
        """All finite points."""
        for segment in self.segments:
            yield from (point for point in segment if math.isfinite(point[1]))


@dataclass(frozen=True)
class Chart:
    """Series over one x axis, with marks at some x values."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()
    """Vertical lines with their labels."""
    log_y: bool = False
    from_zero: bool = False
    """Whether the y axis starts at 0."""
    whole_x: bool = False
    """Whether x takes whole numbers only."""
    x_range: tuple[float, float] | None = None
    """Limits of the x axis, so that several charts agree; from the points if left out."""
    note: str = ""
    """A small line below the title."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(True for s in self.series for _ in s.points())


def format_value(value: float, digits: int = 4) -> str:
    """A value on an axis, with a prefix or a power of ten for large ones."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit and (abs(value) >= 1e4 or limit > 1e3):
            return f"{value / limit:.{digits}g}{prefix}"
    return f"{value:.{digits}g}"


def unbroken(segment: Sequence[Point]) -> Iterator[list[Point]]:
    """The parts of a segment between values that are not finite."""
    part: list[Point] = []
    for point in segment:
        if math.isfinite(point[1]):
            part.append(point)
        elif part:
            yield part
            part = []
    if part:
        yield part


def thin(points: Sequence[Point], columns: int) -> list[Point]:
    """At most four points per column: first, lowest, highest and last. No extreme is lost."""
    if len(points) <= 4 * columns:
        return list(points)
    low, span = points[0][0], points[-1][0] - points[0][0]
    by_column: dict[int, list[Point]] = {}
    for point in points:
        column = min(columns - 1, int((point[0] - low) / span * columns)) if span else 0
        by_column.setdefault(column, []).append(point)
    kept: list[Point] = []
    for group in by_column.values():
        lowest = min(range(len(group)), key=lambda i: group[i][1])
        highest = max(range(len(group)), key=lambda i: group[i][1])
        kept += [group[i] for i in sorted({0, lowest, highest, len(group) - 1})]
    return kept


def medians(points: Sequence[Point], count: int) -> list[Point]:
    """The medians of equal parts of the values."""
    length = -(-len(points) // count)
    parts = [points[start : start + length] for start in range(0, len(points), length)]
    return [(part[len(part) // 2][0], statistics.median(y for _, y in part)) for part in parts]


def draw_chart(*charts: Chart, width: int = 640, height: int = 400) -> Figure:
    """Charts above each other, each of this size in pixels."""
    with style():
        figure = new_figure(width, height * len(charts))
        for number, chart in enumerate(charts):
            above, below = height * number, height * (len(charts) - 1 - number)
            top = 52 if chart.note else 34
            _draw_axes(add_axes(figure, left=74, top=above + top, right=16, bottom=below + 42), chart, width)
    return figure


def _draw_axes(axes: Axes, chart: Chart, width: int) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  (an extra)

    for series in chart.series:
        _draw_series(axes, series, width)
    _draw_marks(axes, chart)
    axes.set_title(chart.title, pad=18 if chart.note else 8)
    if chart.note:
        axes.annotate(
            chart.note, (0, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", fontsize=7.5
        )
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(f"{chart.y_label} (log)" if chart.log_y else chart.y_label)
    values = [y for s in chart.series for _, y in s.points()]
    if chart.log_y and any(y > 0 for y in values):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: format_value(value, 6))
        if chart.from_zero:
            axes.set_ylim(bottom=min([0.0, *values]))
    if chart.x_range is not None and chart.x_range[1] > chart.x_range[0]:
        axes.set_xlim(*chart.x_range)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=chart.whole_x))
    axes.xaxis.set_major_formatter(lambda value, _: format_value(value))
    axes.grid(axis="y")
    if len(chart.series) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(chart.series), borderaxespad=0.2)


def _draw_series(axes: Axes, series: Series, width: int) -> None:
    color, line = COLORS[series.style % len(COLORS)], "--" if series.dashed else "-"
    name: str | None = series.name
    marker = "o" if sum(1 for _ in series.points()) <= MAX_MARKERS and not series.dashed else None
    for segment in series.segments:
        for part in unbroken(segment):
            dense = len(part) > MAX_POINTS
            shown = thin(part, width) if dense else part
            axes.plot(
                [x for x, _ in shown],
                [y for _, y in shown],
                line,
                color=color,
                alpha=0.3 if dense else 1.0,
                marker=marker,
                markersize=3,
                label=None if dense else name,
            )
            if dense:
                over = medians(part, MEDIANS)
                axes.plot([x for x, _ in over], [y for _, y in over], line, color=color, label=name)
            name = None  # one entry in the legend


def _draw_marks(axes: Axes, chart: Chart) -> None:
    for value, name in chart.marks:
        axes.axvline(value, color=INK, linestyle=":", linewidth=0.9)
        if len(chart.marks) <= MAX_MARK_LABELS:
            right = chart.x_range is not None and value > sum(chart.x_range) / 2
            axes.annotate(
                name,
                (value, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(-3 if right else 3, 0),
                textcoords="offset points",
                ha="right" if right else "left",
                va="top",
                fontsize=7.5,
            )
