"""Timelines as text: one line per rank, bar width is proportional to duration."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.report.timeline import Bar, Timeline
from meshwright.schedule.pipeline.actions import Kind

Span = tuple[str, Kind | None, int]
"""Text, the kind of the bar that it belongs to (None while the rank is idle), and the bar's chunk."""


def draw_rows(timeline: Timeline, width: int) -> tuple[list[list[Span]], int]:
    """Each row as spans of text, and how many characters did not fit.

    The shortest bar is one cell wide. A cell holds the longest label, after a space if there is room.
    """
    bars = [bar for _, row in timeline.rows for bar in row]
    shortest = min((bar.end - bar.start for bar in bars if bar.end > bar.start), default=1.0)
    label = max((len(bar.label) for bar in bars), default=0) + 1
    margin = max((len(name) for name, _ in timeline.rows), default=0) + 2
    gap = " " if margin + timeline.end / shortest * (label + 1) <= width else ""
    cell = label + len(gap)
    rows = [_draw_row(row, cell, cell / shortest, gap) for _, row in timeline.rows]
    longest = max((sum(len(text) for text, _, _ in row) for row in rows), default=0)
    named: list[list[Span]] = [
        [(f"{name:<{margin}}", None, 0), *row] for (name, _), row in zip(timeline.rows, rows, strict=True)
    ]
    return [_truncate(row, max(width, margin + cell)) for row in named], max(0, margin + longest - width)


def _draw_row(bars: Sequence[Bar], cell: int, columns_per_time: float, gap: str) -> list[Span]:
    """Bars, and a dot in each idle cell between them."""
    spans: list[Span] = []
    column = 0
    for bar in bars:
        start = max(column, int(bar.start * columns_per_time + 0.5))
        end = max(start + cell, int(bar.end * columns_per_time + 0.5))
        idle = "".join("·" if n % cell == cell - 1 else " " for n in range(column, start))
        spans.append((idle, None, 0))
        spans.append((f"{gap}{bar.kind}{bar.label}".ljust(end - start, "─"), bar.kind, bar.chunk))
        column = end
    return spans


def _truncate(spans: Sequence[Span], width: int) -> list[Span]:
    """The spans up to a width, without empty ones."""
    kept: list[Span] = []
    for text, kind, chunk in spans:
        if text and width > 0:
            kept.append((text[:width], kind, chunk))
        width -= len(text)
    return kept
