"""Timelines as text: a line a rank, a bar an action, as wide as it is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meshwright.report.timeline import Bar, Timeline
from meshwright.schedule.pipeline.actions import Kind

Span = tuple[str, Kind | None, int]
"""Characters, the kind of the bar they belong to (none where the rank is idle), and its chunk."""


@dataclass(frozen=True)
class _TextScale:
    """How times become columns."""

    margin: int
    """Columns of the rows' names."""
    cell: int
    """Columns of the narrowest bar, which hold the longest label."""
    per_time: float
    gap: str
    """Before a label, if there is room."""

    @classmethod
    def of(cls, timelines: Sequence[Timeline], unit: float, width: int) -> _TextScale:
        """One scale for several timelines, with a cell for each unit of time."""
        rows = [row for timeline in timelines for row in timeline.rows]
        label = max((len(bar.label) for _, bars in rows for bar in bars), default=0) + 1
        margin = max((len(name) for name, _ in rows), default=0) + 2
        end = max(timeline.end for timeline in timelines)
        gap = " " if margin + end / unit * (label + 1) <= width else ""
        cell = label + len(gap)
        return cls(margin, cell, cell / unit, gap)


def draw_rows(timeline: Timeline, width: int) -> tuple[list[list[Span]], int]:
    """Each row as spans of text, and how many characters did not fit.

    The shortest bar is one cell wide, which holds the longest label, with a space before it if all fits so;
    every other bar is wider by as much as it is longer.
    """
    unit = min(_lengths(timeline), default=1.0)
    return _draw_scaled(timeline, _TextScale.of([timeline], unit, width), width)


def draw_pair_rows(
    upper: Timeline, lower: Timeline, width: int
) -> tuple[list[list[Span]], list[list[Span]], int]:
    """Two timelines as text, on one scale, and how many characters did not fit.

    A cell is the middle length of the kind with the shortest bars: of measured bars the very shortest may be
    an odd one. A bar that is shorter has a cell all the same, and pushes on what follows it.
    """
    by_kind = [_lengths(upper, kind) + _lengths(lower, kind) for kind in Kind]
    unit = min((median(lengths) for lengths in by_kind if lengths), default=1.0)
    scale = _TextScale.of([upper, lower], unit, width)
    above, missing = _draw_scaled(upper, scale, width)
    below, missing_below = _draw_scaled(lower, scale, width)
    return above, below, max(missing, missing_below)


def _lengths(timeline: Timeline, kind: Kind | None = None) -> list[float]:
    """Of all bars that have one, or of one kind's."""
    bars = [bar for _, row in timeline.rows for bar in row if kind is None or bar.kind is kind]
    return [bar.end - bar.start for bar in bars if bar.end > bar.start]


def _draw_scaled(timeline: Timeline, scale: _TextScale, width: int) -> tuple[list[list[Span]], int]:
    rows = [_draw_row(bars, scale) for _, bars in timeline.rows]
    longest = max((sum(len(text) for text, _, _ in row) for row in rows), default=0)
    named: list[list[Span]] = [
        [(f"{name:<{scale.margin}}", None, 0), *row]
        for (name, _), row in zip(timeline.rows, rows, strict=True)
    ]
    kept = [_cut(row, max(width, scale.margin + scale.cell)) for row in named]
    return kept, max(0, scale.margin + longest - width)


def _draw_row(bars: Sequence[Bar], scale: _TextScale) -> list[Span]:
    """Bars with dots between them, one in each idle cell."""
    spans: list[Span] = []
    cell, column = scale.cell, 0
    for bar in bars:
        start = max(column, int(bar.start * scale.per_time + 0.5))
        end = max(start + cell, int(bar.end * scale.per_time + 0.5))
        idle = "".join("·" if n % cell == cell - 1 else " " for n in range(column, start))
        spans.append((idle, None, 0))
        spans.append((f"{scale.gap}{bar.kind}{bar.label}".ljust(end - start, "─"), bar.kind, bar.chunk))
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
