"""Timelines: a row a rank, a bar an action, as SVG and as text.

A timeline is data, like a chart in ``plot.py``, whose ticks, paper and way with dark surroundings it
shares. It is made from a walked schedule here; bars that were measured would be drawn the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from meshwright.explain.plot import PAPER, format_value, round_ticks, tick_labels
from meshwright.schedule.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.walk import Walk

KIND_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}
MOST_BARS = 20_000
"""A picture with more is too large for a browser, and its bars are thinner than a pixel."""


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

    @property
    def end(self) -> float:
        """When the last bar ends."""
        return max((bars[-1].end for _, bars in self.rows if bars), default=0.0)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that are in it."""
        found = {bar.kind for _, bars in self.rows for bar in bars}
        return tuple(kind for kind in Kind if kind in found)


def build_timeline(schedule: PipelineSchedule, walk: Walk, title: str, note: str) -> Timeline:
    """The timeline of a walked schedule."""
    rows = []
    for rank, row in enumerate(schedule.ranks):
        times = zip(row, walk.start_s[rank], walk.end_s[rank], strict=True)
        rows.append((f"rank {rank}", tuple(_bar(schedule, *timed) for timed in times)))
    return Timeline(title, note, tuple(rows))


def _bar(schedule: PipelineSchedule, action: Action, start: float, end: float) -> Bar:
    chunk = schedule.stages_of(schedule.rank_of(action.stage)).index(action.stage)
    letter = chr(ord("a") + chunk % 26) if schedule.virtual_stages > 1 else ""
    says = f"{KIND_NAMES[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}: "
    says += f"{format_value(start)} to {format_value(end)}"
    return Bar(start, end, f"{action.micro_batch}{letter}", action.kind, chunk, says)


# Text

Span = tuple[str, Kind | None, int]
"""Characters, the kind of the bar they belong to (none where the rank is idle), and its chunk."""


def draw_rows(timeline: Timeline, width: int) -> tuple[list[list[Span]], int]:
    """Each row as spans of text, and how many characters did not fit.

    The shortest bar is one cell wide, which holds the longest label, with a space before it if all fits so;
    every other bar is wider by as much as it is longer.
    """
    bars = [bar for _, row in timeline.rows for bar in row]
    unit = min((bar.end - bar.start for bar in bars if bar.end > bar.start), default=1.0)
    label = max((len(bar.label) for bar in bars), default=0) + 1
    margin = max((len(name) for name, _ in timeline.rows), default=0) + 2
    gap = " " if margin + timeline.end / unit * (label + 1) <= width else ""
    cell = label + len(gap)
    rows = [_draw_row(row, cell, cell / unit, gap) for _, row in timeline.rows]
    longest = max((sum(len(text) for text, _, _ in row) for row in rows), default=0)
    named = [
        [(f"{name:<{margin}}", None, 0), *row] for (name, _), row in zip(timeline.rows, rows, strict=True)
    ]
    return [_cut(row, max(width, margin + cell)) for row in named], max(0, margin + longest - width)


def _draw_row(bars: Sequence[Bar], cell: int, scale: float, gap: str) -> list[Span]:
    """Bars with dots between them, one in each idle cell."""
    spans: list[Span] = []
    column = 0
    for bar in bars:
        start = max(column, int(bar.start * scale + 0.5))
        end = max(start + cell, int(bar.end * scale + 0.5))
        idle = "".join("·" if n % cell == cell - 1 else " " for n in range(column, start))
        spans.append((idle, None, 0))
        spans.append((f"{gap}{bar.kind}{bar.label}".ljust(end - start, "─"), bar.kind, bar.chunk))
        column = end
    return spans


def _cut(spans: Sequence[Span], width: int) -> list[Span]:
    """The spans up to a width, without empty ones."""
    kept: list[Span] = []
    for text, kind, chunk in spans:
        if text and width > 0:
            kept.append((text[:width], kind, chunk))
        width -= len(text)
    return kept


# SVG

STYLE = """
.mw-time { font: 12px system-ui, sans-serif; }
.mw-time text { fill: #3b4048; }
.mw-time .t { font-size: 14px; font-weight: 600; fill: #16191d; }
.mw-time .note { font-size: 11px; }
.mw-time .idle { fill: #eef0f3; }
.mw-time .axis { stroke: #8a919b; stroke-width: 1; }
.mw-time .F { fill: #1f62b5; } .mw-time .B { fill: #2b7d4f; } .mw-time .W { fill: #c05a00; }
.mw-time .later { fill-opacity: .72; }
.mw-time .in { fill: #ffffff; font-size: 10px; pointer-events: none; }
@media (prefers-color-scheme: dark) { @media screen {
.mw-time text { fill: #c3c9d1; }
.mw-time .t { fill: #eef1f4; }
.mw-time .idle { fill: #262b32; }
.mw-time .in { fill: #ffffff; }
} }
"""
LEFT, RIGHT, TOP, ROW, GAP, BOTTOM = 64, 16, 70, 24, 4, 40
"""Margins, and the height of a row and of what is between two, in pixels."""
NARROWEST_LABEL = 6.5
"""Pixels that a character in a bar needs."""


def draw_svg(timeline: Timeline, width: int = 960) -> str:
    """The timeline as an SVG file."""
    height = TOP + len(timeline.rows) * (ROW + GAP) + BOTTOM
    scale = (width - LEFT - RIGHT) / (timeline.end or 1.0)
    parts = [
        (
            f'<svg class="mw-time" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(timeline.title)}">'
        ),
        f'<style>{STYLE}{PAPER}</style><rect class="mw-paper" width="100%" height="100%"/>',
        f'<text class="t" x="12" y="22">{escape(timeline.title)}</text>',
        f'<text class="note" x="12" y="38">{escape(timeline.note)}</text>',
        *_legend(timeline),
    ]
    for index, (name, bars) in enumerate(timeline.rows):
        y = TOP + index * (ROW + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{width - LEFT - RIGHT}" height="{ROW}"/>')
        for bar in bars:
            parts += _draw_bar(bar, y, scale)
    return "\n".join([*parts, *_time_axis(timeline, width, height, scale), "</svg>"]) + "\n"


def _legend(timeline: Timeline) -> list[str]:
    parts, x = [], 12
    for kind in timeline.kinds:
        parts.append(f'<rect class="{kind}" x="{x}" y="48" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="58">{KIND_NAMES[kind]}</text>')
        x += 34 + 7 * len(KIND_NAMES[kind])
    return parts


def _draw_bar(bar: Bar, y: int, scale: float) -> list[str]:
    x, wide = LEFT + bar.start * scale, (bar.end - bar.start) * scale
    later = " later" if bar.chunk else ""
    gap = min(1.0, wide / 4)
    parts = [
        (
            f'<rect class="{bar.kind}{later}" x="{x:.2f}" y="{y}" width="{wide - gap:.2f}" height="{ROW}">'
            f"<title>{escape(bar.says)}</title></rect>"
        )
    ]
    if wide >= NARROWEST_LABEL * len(bar.label):
        middle = x + (wide - gap) / 2
        parts.append(
            f'<text class="in" x="{middle:.2f}" y="{y + 16}" text-anchor="middle">{escape(bar.label)}</text>'
        )
    return parts


def _time_axis(timeline: Timeline, width: int, height: int, scale: float) -> list[str]:
    y = height - BOTTOM + 2
    parts = [f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{y}" y2="{y}"/>']
    ticks = round_ticks(0.0, timeline.end, about=8)
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        x = LEFT + tick * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{width - RIGHT}" y="{y + 34}" text-anchor="end">time</text>')
    return parts
