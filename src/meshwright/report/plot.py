"""Line charts as SVG: round ticks, a logarithmic axis, long series thinned without losing an extreme.

A chart is data, drawn here for pages and files and in ``text_plot.py`` for terminals. Colours are plain
classes with a second set for dark surroundings, so that a chart needs no script and no other file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

MOST_TOOLTIPS = 120
"""Places of a series that say their value when pointed at."""
MOST_DOTS = 40
"""A longer series is a line without dots."""
MOST_NAMES = 6
"""More marks than this have their names in tooltips only."""
MIDDLES = 180
"""Columns whose medians are drawn over a series that has more points than pixels."""


@dataclass(frozen=True)
class Series:
    """One line. A value that is not finite breaks it; segments are attempts at the same thing."""

    name: str
    segments: tuple[tuple[Point, ...], ...]
    style: int = 0
    """Which colour, counted from 0."""
    dashed: bool = False

    def points(self) -> Iterator[Point]:
        """All that can be drawn."""
        for segment in self.segments:
            yield from (point for point in segment if math.isfinite(point[1]))


@dataclass(frozen=True)
class Chart:
    """What is drawn: series over one x axis, and marks at some of its places."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()
    """Vertical lines with their names."""
    log_y: bool = False
    from_zero: bool = False
    """Whether the y axis begins at 0."""
    whole_x: bool = False
    """Whether x counts things: no ticks between whole numbers."""
    x_range: tuple[float, float] | None = None
    """Where the x axis begins and ends, so that several charts agree; by the points if left out."""
    note: str = ""
    """A small line below the title."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(True for s in self.series for _ in s.points())


@dataclass(frozen=True)
class Axis:
    """From values to places in 0 to 1, with ticks at round values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies; 0 is the low end."""
        if self.log:
            span = math.log(self.high / self.low)
            return math.log(max(value, self.low) / self.low) / span if span else 0.5
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5


def round_ticks(low: float, high: float, about: int = 5, whole: bool = False) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that lie within the range, about as many as asked."""
    if not high > low:
        return (low,)
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(round(n * step, 12) if abs(step) >= 1e-9 else n * step for n in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten within the range, and their 2 and 5 folds where the range is short."""
    decades = math.log10(high / low)
    folds = (1,) if decades > 3 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [f * 10.0**p for p in powers for f in folds]
    inside = tuple(t for t in found if low * 0.999 <= t <= high * 1.001)
    if len(inside) >= 2:
        return inside
    return tuple(t for t in round_ticks(low, high) if t > 0) or (low, high)


def y_axis(chart: Chart, about: int = 5) -> Axis:
    """The vertical axis that holds every value, with a little air and about that many ticks."""
    values = [y for s in chart.series for _, y in s.points() if y > 0 or not chart.log_y]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if chart.log_y and values:
        low, high = (low, high) if high > low else (low / 2, high * 2)
        return Axis(low / 1.05, high * 1.05, log_ticks(low / 1.05, high * 1.05), log=True)
    if chart.from_zero:
        low = min(0.0, low)
    if high <= low:
        spare = abs(high) * 0.1 or 1.0
        low, high = low - (0 if chart.from_zero and low == 0 else spare), high + spare
    air = (high - low) * 0.05
    low, high = (low if chart.from_zero and low == 0 else low - air), high + air
    return Axis(low, high, round_ticks(low, high, about))


def x_axis(chart: Chart) -> Axis:
    """The horizontal axis, from the first to the last point; a single one is in the middle."""
    values = [*(x for s in chart.series for x, _ in s.points()), *(chart.x_range or ())]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high <= low:
        return Axis(low - 1, high + 1, (low,))
    return Axis(low, high, round_ticks(low, high, about=8, whole=chart.whole_x))


def thin(points: Sequence[Point], columns: int) -> list[Point]:
    """At most four points a column: the first, the lowest, the highest and the last of those that fall in it.

    What a line through all points would show at that width, the thinned one shows too.
    """
    if len(points) <= columns * 4:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / columns or 1.0
    kept: list[Point] = []
    column: list[Point] = []
    number = 0
    for point in points:
        here = min(columns - 1, int((point[0] - low) / width))
        if here != number and column:
            kept += _outline(column)
            column = []
        number = here
        column.append(point)
    return kept + _outline(column)


def middles(points: Sequence[Point], columns: int) -> list[Point]:
    """The median of each of so many equal stretches: where a line goes that is too dense to be seen."""
    length = -(-len(points) // columns)
    stretches = [points[start : start + length] for start in range(0, len(points), length)]
    return [(s[len(s) // 2][0], statistics.median(y for _, y in s)) for s in stretches]


def _outline(column: Sequence[Point]) -> list[Point]:
    lowest = min(range(len(column)), key=lambda i: column[i][1])
    highest = max(range(len(column)), key=lambda i: column[i][1])
    return [column[i] for i in sorted({0, lowest, highest, len(column) - 1})]


def unbroken(segment: Sequence[Point]) -> Iterator[list[Point]]:
    """The stretches of a segment between values that are not finite."""
    run: list[Point] = []
    for point in segment:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The ticks as text, with as many digits as it takes to tell them apart."""
    for digits in range(4, 10):
        labels = [format_value(tick, digits) for tick in ticks]
        if len(set(labels)) == len(labels):
            break
    return labels


def format_value(value: float, digits: int = 4) -> str:
    """A value on an axis or in a tooltip, with a prefix or a power for the large ones."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-3 or abs(value) >= 1e15:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit and (abs(value) >= 1e4 or limit > 1e3):
            return f"{value / limit:.{digits}g} {prefix}"
    return f"{value:.{digits}g}"


STYLE = """
.mw-chart { font: 12px system-ui, sans-serif; }
.mw-chart text { fill: #3b4048; }
.mw-chart .t { font-size: 14px; font-weight: 600; fill: #16191d; }
.mw-chart .note { font-size: 11px; }
.mw-chart .grid { stroke: #e3e6ea; stroke-width: 1; }
.mw-chart .frame { stroke: #8a919b; stroke-width: 1; fill: none; }
.mw-chart .mark { stroke: #8a919b; stroke-width: 1; stroke-dasharray: 2 3; }
.mw-chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.mw-chart .faint { stroke-opacity: .3; stroke-width: 1; }
.mw-chart .dashed { stroke-dasharray: 6 4; }
.mw-chart .hit { fill: transparent; stroke: none; }
.mw-chart .s0 { stroke: #1f62b5; } .mw-chart .d0 { fill: #1f62b5; }
.mw-chart .s1 { stroke: #c05a00; } .mw-chart .d1 { fill: #c05a00; }
.mw-chart .s2 { stroke: #6f7782; } .mw-chart .d2 { fill: #6f7782; }
.mw-chart .s3 { stroke: #2b7d4f; } .mw-chart .d3 { fill: #2b7d4f; }
@media (prefers-color-scheme: dark) { @media screen {
.mw-chart text { fill: #c3c9d1; }
.mw-chart .t { fill: #eef1f4; }
.mw-chart .grid { stroke: #30363e; }
.mw-chart .frame { stroke: #7b838d; } .mw-chart .mark { stroke: #9aa2ac; }
.mw-chart .s0 { stroke: #74b0f4; } .mw-chart .d0 { fill: #74b0f4; }
.mw-chart .s1 { stroke: #f3a254; } .mw-chart .d1 { fill: #f3a254; }
.mw-chart .s2 { stroke: #9aa2ac; } .mw-chart .d2 { fill: #9aa2ac; }
.mw-chart .s3 { stroke: #69c592; } .mw-chart .d3 { fill: #69c592; }
} }
"""
"""Colours of a chart; a page has them once, a file of its own has them inside."""
PAPER = """
.mw-paper { fill: #ffffff; }
@media (prefers-color-scheme: dark) { @media screen { .mw-paper { fill: #16191d; } } }
"""
"""The ground of a chart that stands alone."""


@dataclass(frozen=True)
class Frame:
    """Where a chart's plotting area lies in its picture, in pixels."""

    width: int
    height: int
    left: int = 72
    right: int = 18
    top: int = 48
    bottom: int = 46

    @property
    def columns(self) -> int:
        """Pixels across the plotting area."""
        return self.width - self.left - self.right

    def x(self, place: float) -> float:
        """From a place on the axis to a pixel."""
        return round(self.left + place * self.columns, 1)

    def y(self, place: float) -> float:
        """From a place on the axis to a pixel; up is more."""
        return round(self.height - self.bottom - place * (self.height - self.top - self.bottom), 1)


TITLE_Y, NOTE_LINE, LEGEND_LINE = 22, 16, 18
"""Where the title stands, and how much further down the next lines are, in pixels."""


def build_frame(chart: Chart, up: Axis, width: int, height: int) -> Frame:
    """Room for the longest label beside the axis, and for all lines above it."""
    longest = max(map(len, tick_labels(up.ticks)), default=0)
    top = 48 + (NOTE_LINE if chart.note else 0) + (0 if _legend_beside_title(chart, width) else LEGEND_LINE)
    return Frame(width, height, left=max(72, 34 + 7 * longest), top=top)


def _legend_width(chart: Chart) -> float:
    return sum(7.0 * len(series.name) + 44 for series in chart.series) if len(chart.series) > 1 else 0.0


def _legend_beside_title(chart: Chart, width: int) -> bool:
    """Whether both fit into one line."""
    return 12 + 8.0 * len(chart.title) + _legend_width(chart) + 18 <= width


def draw_svg(chart: Chart, width: int = 720, height: int = 300, standalone: bool = False) -> str:
    """The chart as an SVG element, or as a file of its own."""
    across, up = x_axis(chart), y_axis(chart, about=height // 56)
    frame = build_frame(chart, up, width, height)
    parts = [
        (
            f'<svg class="mw-chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(chart.title)}">'
        )
    ]
    if standalone:
        parts.append(f'<style>{STYLE}{PAPER}</style><rect class="mw-paper" width="100%" height="100%"/>')
    parts += _grid(chart, frame, across, up)
    parts += _marks(chart, frame, across)
    for series in chart.series:
        parts += _series(chart, series, frame, across, up)
    parts += _words(chart, frame)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(chart: Chart, frame: Frame, across: Axis, up: Axis) -> list[str]:
    left, right, bottom, top = frame.x(0), frame.x(1), frame.y(0), frame.y(1)
    parts: list[str] = []
    for tick, label in zip(up.ticks, tick_labels(up.ticks), strict=True):
        y = frame.y(up.place(tick))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{label}</text>')
    for tick, label in zip(across.ticks, tick_labels(across.ticks), strict=True):
        x = frame.x(across.place(tick))
        parts.append(f'<line class="frame" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 19}" text-anchor="middle">{label}</text>')
    parts.append(f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>')
    return parts


def _marks(chart: Chart, frame: Frame, across: Axis) -> list[str]:
    parts: list[str] = []
    for value, name in chart.marks:
        if across.low <= value <= across.high:
            x = frame.x(across.place(value))
            parts.append(
                f'<line class="mark" x1="{x}" x2="{x}" y1="{frame.y(1)}" y2="{frame.y(0)}">'
                f"<title>{escape(name)}</title></line>"
            )
            if len(chart.marks) > MOST_NAMES:
                continue
            anchor = "start" if across.place(value) < 0.8 else "end"
            parts.append(f'<text x="{x}" y="{frame.y(1) - 4}" text-anchor="{anchor}">{escape(name)}</text>')
    return parts


def _series(chart: Chart, series: Series, frame: Frame, across: Axis, up: Axis) -> list[str]:
    parts: list[str] = []
    shown: list[Point] = []
    dashed = " dashed" if series.dashed else ""
    for segment in series.segments:
        for run in unbroken(segment):
            places = thin(run, frame.columns)
            shown += places
            dense = len(places) < len(run)
            look = f"line s{series.style}{dashed}"
            parts.append(_line(look + (" faint" if dense else ""), places, frame, across, up))
            if dense:
                parts.append(_line(look, middles(run, MIDDLES), frame, across, up))
    if len(shown) <= MOST_DOTS and not series.dashed:
        parts += [
            f'<circle class="d{series.style}" cx="{frame.x(across.place(x))}" '
            f'cy="{frame.y(up.place(y))}" r="2.6"/>'
            for x, y in shown
        ]
    every = -(-len(shown) // MOST_TOOLTIPS) or 1
    for x, y in shown[::every]:
        says = f"{chart.x_label} {format_value(x)}: {series.name} {format_value(y)}"
        parts.append(
            f'<circle class="hit" cx="{frame.x(across.place(x))}" cy="{frame.y(up.place(y))}" r="6">'
            f"<title>{escape(says)}</title></circle>"
        )
    return parts


def _line(look: str, points: Sequence[Point], frame: Frame, across: Axis, up: Axis) -> str:
    places = " ".join(f"{frame.x(across.place(x))},{frame.y(up.place(y))}" for x, y in points)
    return f'<polyline class="{look}" points="{places}"/>'


def _words(chart: Chart, frame: Frame) -> list[str]:
    """Title, names of the axes with their units, and the legend where there are several lines."""
    middle = (frame.top + frame.height - frame.bottom) / 2
    unit = chart.y_label + (" (log)" if chart.log_y else "")
    parts = [
        f'<text class="t" x="12" y="{TITLE_Y}">{escape(chart.title)}</text>',
        (
            f'<text x="{frame.left + frame.columns / 2}" y="{frame.height - 8}" text-anchor="middle">'
            f"{escape(chart.x_label)}</text>"
        ),
        (
            f'<text x="15" y="{middle}" text-anchor="middle" transform="rotate(-90 15 {middle})">'
            f"{escape(unit)}</text>"
        ),
    ]
    y = TITLE_Y
    if chart.note:
        parts.append(f'<text class="note" x="12" y="{TITLE_Y + NOTE_LINE}">{escape(chart.note)}</text>')
    if not _legend_beside_title(chart, frame.width):
        y += LEGEND_LINE + (NOTE_LINE if chart.note else 0)
    if len(chart.series) > 1:
        x = float(frame.width - frame.right)
        for series in reversed(chart.series):
            x -= 7.0 * len(series.name)
            dashed = " dashed" if series.dashed else ""
            parts.append(f'<text x="{x:.0f}" y="{y}">{escape(series.name)}</text>')
            place = f'x1="{x - 26:.0f}" x2="{x - 6:.0f}" y1="{y - 4}" y2="{y - 4}"'
            parts.append(f'<line class="line s{series.style}{dashed}" {place}/>')
            x -= 44
    return parts
