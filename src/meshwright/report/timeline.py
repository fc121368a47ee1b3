"""Timelines: a row a rank, a bar an action, from a walked schedule or from what was measured.

A timeline is data, drawn alike wherever its bars come from: as a picture here, alone or two above each other
with a common axis of time; as text in ``timeline_text.py``. A picture is laid out once, as boxes, lines and
words with a style each. SVG knows the styles by their names, so that they follow dark surroundings, PNG by
their colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.report.canvas import Anchor, PngCanvas
from meshwright.report.plot import PAPER, format_value, round_ticks, tick_labels
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.walk import Walk

KIND_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}
MOST_BARS = 20_000
"""A picture with more is too large for a browser, and its bars are thinner than a pixel."""
WIDTH = 960
LEFT, RIGHT, ROW, GAP, BOTTOM = 64, 16, 24, 4, 40
"""Margins, and the height of a row and of what is between two, in pixels."""
HEADING, LEGEND = 48, 22
"""Heights of title and note, and of the kinds below those of the first timeline."""
NARROWEST_LABEL = 6.5
"""Pixels that a character in a bar needs."""

FILLS = {"idle": "#eef0f3", "F": "#1f62b5", "B": "#2b7d4f", "W": "#c05a00", "axis": "#8a919b"}
INKS = {"word": "#3b4048", "note": "#3b4048", "t": "#16191d", "in": "#ffffff"}
LATER = 0.72
"""How much of its colour a bar of a rank's second and further stages has."""
STYLE = f"""
.mw-time {{ font: 12px system-ui, sans-serif; }}
.mw-time .word, .mw-time .note {{ fill: {INKS["word"]}; }}
.mw-time .t {{ font-size: 14px; font-weight: 600; fill: {INKS["t"]}; }}
.mw-time .note {{ font-size: 11px; }}
.mw-time .idle {{ fill: {FILLS["idle"]}; }}
.mw-time .axis {{ stroke: {FILLS["axis"]}; stroke-width: 1; }}
.mw-time .F {{ fill: {FILLS["F"]}; }}
.mw-time .B {{ fill: {FILLS["B"]}; }}
.mw-time .W {{ fill: {FILLS["W"]}; }}
.mw-time .later {{ fill-opacity: {LATER}; }}
.mw-time .in {{ fill: {INKS["in"]}; font-size: 10px; pointer-events: none; }}
@media (prefers-color-scheme: dark) {{ @media screen {{
.mw-time .word, .mw-time .note {{ fill: #c3c9d1; }}
.mw-time .t {{ fill: #eef1f4; }}
.mw-time .idle {{ fill: #262b32; }}
}} }}
"""


@dataclass(frozen=True)
class Bar:
    """One stretch of a row."""

    start: float
    end: float
    label: str
    kind: Kind
    chunk: int = 0
    """Which of the rank's stages, counted from 0; later ones are drawn lighter."""
    says: str = ""
    """When pointed at."""


@dataclass(frozen=True)
class Timeline:
    """What is drawn."""

    title: str
    note: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    """The name of each row and its bars, in the order of time."""
    unit: str = ""
    """Of the times; none if it is whatever the user's numbers are in."""

    @property
    def end(self) -> float:
        """When the last bar ends."""
        return max((bar.end for _, bars in self.rows for bar in bars), default=0.0)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that are in it."""
        found = {bar.kind for _, bars in self.rows for bar in bars}
        return tuple(kind for kind in Kind if kind in found)


def build_timeline(schedule: PipelineSchedule, walk: Walk, title: str, note: str, unit: str = "") -> Timeline:
    """The timeline of a walked schedule."""
    rows = [
        tuple(_bar(schedule, *timed) for timed in zip(row, starts, ends, strict=True))
        for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
    ]
    return Timeline(title, note, _named(rows), unit)


def measured_timeline(
    schedule: PipelineSchedule, spans: Sequence[Sequence[tuple[Action, float, float]]], title: str, note: str
) -> Timeline:
    """The timeline of what ran, counted from the first start of all ranks.

    Args:
        schedule: What was to run: it knows which of a rank's stages an action belongs to.
        spans: For each rank its actions with start and end in seconds, on a clock that all ranks share, in
            any order.
        title: Above the picture.
        note: Below the title.
    """
    first = min((start for row in spans for _, start, _ in row), default=0.0)
    rows = [
        tuple(_bar(schedule, action, start - first, end - first) for action, start, end in ordered)
        for ordered in (sorted(row, key=lambda span: span[1]) for row in spans)
    ]
    return Timeline(title, note, _named(rows), unit="s")


def _named(rows: Sequence[tuple[Bar, ...]]) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    return tuple((f"rank {rank}", bars) for rank, bars in enumerate(rows))


def _bar(schedule: PipelineSchedule, action: Action, start: float, end: float) -> Bar:
    chunk = schedule.stages_of(schedule.rank_of(action.stage)).index(action.stage)
    letter = chr(ord("a") + chunk % 26) if schedule.virtual_stages > 1 else ""
    says = f"{KIND_NAMES[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}: "
    says += f"{format_value(start)} to {format_value(end)}"
    return Bar(start, end, f"{action.micro_batch}{letter}", action.kind, chunk, says)


# Pictures


@dataclass(frozen=True)
class _Box:
    """A filled box."""

    style: str
    x: float
    y: float
    width: float
    height: float
    says: str = ""
    later: bool = False


@dataclass(frozen=True)
class _Line:
    """A part of the axis."""

    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True)
class _Words:
    """Words on a base line."""

    style: str
    x: float
    y: float
    words: str
    anchor: Anchor = "start"


_Mark = _Box | _Line | _Words


def draw_svg(timeline: Timeline) -> str:
    """The timeline as an SVG file."""
    return _as_svg([timeline])


def draw_png(timeline: Timeline) -> bytes:
    """The timeline as a PNG file."""
    return _as_png([timeline])


def draw_pair_svg(upper: Timeline, lower: Timeline) -> str:
    """Two timelines in one SVG file, on one axis of time: what was simulated above what was measured."""
    return _as_svg([upper, lower])


def draw_pair_png(upper: Timeline, lower: Timeline) -> bytes:
    """Two timelines in one PNG file, likewise."""
    return _as_png([upper, lower])


def _lay_out(timelines: Sequence[Timeline]) -> tuple[list[_Mark], int]:
    """Everything that is drawn, and the height."""
    end = max(timeline.end for timeline in timelines)
    scale = (WIDTH - LEFT - RIGHT) / (end or 1.0)
    marks: list[_Mark] = []
    y = 0
    for index, timeline in enumerate(timelines):
        marks.append(_Words("t", 12, y + 22, timeline.title))
        marks.append(_Words("note", 12, y + 38, timeline.note))
        y += HEADING
        if index == 0:
            marks += _legend(timelines, y)
            y += LEGEND
        for name, bars in timeline.rows:
            marks.append(_Words("word", LEFT - 8, y + 16, name, "end"))
            marks.append(_Box("idle", LEFT, y, WIDTH - LEFT - RIGHT, ROW))
            marks += [mark for bar in bars for mark in _draw_bar(bar, y, scale)]
            y += ROW + GAP
    return marks + _time_axis(end, timelines[0].unit, y + 2, scale), y + BOTTOM


def _legend(timelines: Sequence[Timeline], y: int) -> list[_Mark]:
    marks: list[_Mark] = []
    x = 12
    for kind in Kind:
        if any(kind in timeline.kinds for timeline in timelines):
            marks.append(_Box(kind.value, x, y, 12, 12))
            marks.append(_Words("word", x + 17, y + 10, KIND_NAMES[kind]))
            x += 34 + 7 * len(KIND_NAMES[kind])
    return marks


def _draw_bar(bar: Bar, y: int, scale: float) -> list[_Mark]:
    x, wide = LEFT + bar.start * scale, (bar.end - bar.start) * scale
    gap = min(1.0, wide / 4)
    marks: list[_Mark] = [_Box(bar.kind.value, x, y, wide - gap, ROW, bar.says, bar.chunk > 0)]
    if wide >= NARROWEST_LABEL * len(bar.label):
        marks.append(_Words("in", x + (wide - gap) / 2, y + 16, bar.label, "middle"))
    return marks


def _time_axis(end: float, unit: str, y: int, scale: float) -> list[_Mark]:
    marks: list[_Mark] = [_Line((LEFT, y), (WIDTH - RIGHT, y))]
    ticks = round_ticks(0.0, end, about=8)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = LEFT + tick * scale
        marks.append(_Line((x, y), (x, y + 5)))
        marks.append(_Words("word", x, y + 18, label, "middle"))
    marks.append(_Words("word", WIDTH - RIGHT, y + 34, f"time, {unit}" if unit else "time", "end"))
    return marks


def _as_svg(timelines: Sequence[Timeline]) -> str:
    marks, height = _lay_out(timelines)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    label = escape("; ".join(timeline.title for timeline in timelines))
    parts = [
        f'<svg class="mw-time" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
        f'<style>{STYLE}{PAPER}</style><rect class="mw-paper" width="100%" height="100%"/>',
        *map(_element, marks),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _element(mark: _Mark) -> str:
    if isinstance(mark, _Words):
        place = f'x="{mark.x:.2f}" y="{mark.y:g}" text-anchor="{mark.anchor}"'
        return f'<text class="{mark.style}" {place}>{escape(mark.words)}</text>'
    if isinstance(mark, _Line):
        (x1, y1), (x2, y2) = mark.start, mark.end
        return f'<line class="axis" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:g}" y2="{y2:g}"/>'
    style = f"{mark.style} later" if mark.later else mark.style
    says = f"<title>{escape(mark.says)}</title>" if mark.says else ""
    place = f'x="{mark.x:.2f}" y="{mark.y:g}" width="{mark.width:.2f}" height="{mark.height:g}"'
    return f'<rect class="{style}" {place}>{says}</rect>'


def _as_png(timelines: Sequence[Timeline]) -> bytes:
    marks, height = _lay_out(timelines)
    canvas = PngCanvas(WIDTH, height, "; ".join(timeline.title for timeline in timelines))
    for mark in marks:
        if isinstance(mark, _Words):
            canvas.text(mark.x, mark.y, mark.words, mark.anchor, INKS[mark.style])
        elif isinstance(mark, _Line):
            canvas.line(mark.start, mark.end, FILLS["axis"])
        else:
            colour = FILLS[mark.style]
            canvas.rect(mark.x, mark.y, mark.width, mark.height, _lighter(colour) if mark.later else colour)
    return canvas.finish()


def _lighter(colour: str) -> str:
    """The colour on white paper, with as much of it as :data:`LATER` says."""
    channels = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(255 - LATER * (255 - channel)):02x}" for channel in channels)
