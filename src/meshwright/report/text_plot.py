"""Charts on a terminal: braille dots, two across and four down in each character."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from meshwright.report.plot import Chart, format_value, unbroken

BRAILLE = 0x2800
BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dot of a braille character, by row and column."""


@dataclass(frozen=True)
class Axis:
    """Maps values to 0 to 1."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies; 0 is the low end."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def x_axis(chart: Chart) -> Axis:
    """From the first to the last point; a single point is in the middle."""
    values = [*(x for s in chart.series for x, _ in s.points()), *(chart.x_range or ())]
    low, high = min(values), max(values)
    return Axis(low, high) if high > low else Axis(low - 1, high + 1)


def y_axis(chart: Chart) -> Axis:
    """All values with a margin of 5%."""
    values = [y for s in chart.series for _, y in s.points() if y > 0 or not chart.log_y]
    if chart.log_y and values:
        return Axis(min(values) / 1.05, max(values) * 1.05, log=True)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if chart.from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return Axis(low if chart.from_zero and low == 0 else low - margin, high + margin)


class _Canvas:
    """Dots on a grid of characters."""

    def __init__(self, columns: int, rows: int) -> None:
        self.width, self.height = columns * 2, rows * 4
        self._cells = [[0] * columns for _ in range(rows)]

    def dot(self, x: int, y: int) -> None:
        """Set one dot; y counts from the bottom."""
        if 0 <= x < self.width and 0 <= y < self.height:
            down = self.height - 1 - y
            self._cells[down // 4][x // 2] |= BITS[down % 4][x % 2]

    def line(self, start: tuple[int, int], end: tuple[int, int], every: int = 1) -> None:
        """Draw dots from one place to another, or only every n-th dot."""
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for n in range(0, steps + 1, every):
            x = start[0] + (end[0] - start[0]) * n / steps
            y = start[1] + (end[1] - start[1]) * n / steps
            self.dot(round(x), round(y))

    def rows(self) -> list[str]:
        """The characters, one text per row; empty cells are spaces."""
        return ["".join(chr(BRAILLE + c) if c else " " for c in row) for row in self._cells]


def draw_text(chart: Chart, columns: int = 64, rows: int = 10) -> list[str]:
    """The chart as lines of text; nothing for an empty one."""
    if chart.empty:
        return []
    across, up = x_axis(chart), y_axis(chart)
    canvas = _Canvas(columns, rows)
    for series in chart.series:
        for segment in series.segments:
            for run in unbroken(segment):
                places = [_place(canvas, across, up, x, y) for x, y in run]
                canvas.dot(*places[0])
                # A long series falls on the same dots again and again.
                for start, end in dict.fromkeys(pairwise(places)):
                    canvas.line(start, end, every=4 if series.dashed else 1)
    return _framed(chart, canvas.rows(), across, up)


def _place(canvas: _Canvas, across: Axis, up: Axis, x: float, y: float) -> tuple[int, int]:
    return round(across.place(x) * (canvas.width - 1)), round(up.place(y) * (canvas.height - 1))


def _framed(chart: Chart, drawn: list[str], across: Axis, up: Axis) -> list[str]:
    """Title, the values at the ends of both axes, and the dots between."""
    high, low = format_value(float(f"{up.high:.4g}")), format_value(float(f"{up.low:.4g}"))
    margin = max(len(high), len(low))
    labels = [high, *[""] * (len(drawn) - 2), low]
    names = " and ".join(series.name for series in chart.series)
    lines = [f"{chart.title} ({chart.y_label}{', log' if chart.log_y else ''}: {names})"]
    lines += [f"{label:>{margin}} │{row}".rstrip() for label, row in zip(labels, drawn, strict=True)]
    lines.append(f"{'':>{margin}} └{'─' * len(drawn[0])}")
    places = {x for series in chart.series for x, _ in series.points()} | set(chart.x_range or ())
    if len(places) == 1:  # in the middle
        label = f"{chart.x_label} {format_value(places.pop())}"
        return [*lines, f"{'':>{margin}}  {label:^{len(drawn[0])}}".rstrip()]
    left, right = format_value(across.low), format_value(across.high)
    space = max(1, len(drawn[0]) - len(left) - len(right))
    name = chart.x_label.center(space) if len(chart.x_label) + 2 <= space else " " * space
    lines.append(f"{'':>{margin}}  {left}{name}{right}")
    return lines
