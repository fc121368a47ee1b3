"""A plan as a picture: memory by rank class against the device, the step by parts, speed over layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from meshwright.core.units import format_bytes, format_rate, format_seconds
from meshwright.report.canvas import ADVANCE, Canvas, PngCanvas, SvgCanvas
from meshwright.report.plot import round_ticks

WIDTH, LEFT, RIGHT = 1040, 100, 90
BAR, GAP, TOP, TITLE, LABEL, AXIS = 20, 8, 40, 26, 16, 26
CURVE_HEIGHT = 150
MOST_STEPS, MOST_RANKS = 6, 8
COLOURS = (
    "#1f62b5", "#c05a00", "#2b7d4f", "#8e44ad", "#b5891f", "#6f7782",
    "#b3304c", "#2d9da6", "#7a8f2a", "#4a4f9c", "#a65d8c", "#3b4048",
)  # fmt: skip
PASSES = ("forward", "weight gradient", "backward")
"""Kinds of passes, in the order of the colours that ``schedule pipeline`` gives them, too."""
GREY, RED, INK = "#e3e6ea", "#b3304c", "#3b4048"


@dataclass(frozen=True)
class PlanPicture:
    """What is drawn."""

    title: str
    memory: dict[str, dict[str, float]]
    """Bytes by rank class and line."""
    room_bytes: float
    """Memory of a device."""
    steps: list[tuple[str, dict[str, float]]]
    """Layouts, best first, each with the seconds of its parts."""
    rates: npt.NDArray[np.float64]
    """Tokens a second and device of every layout that fits, in any order."""
    unit: str = "tokens"
    pipeline: list[tuple[str, list[tuple[str, float, float]]]] = field(default_factory=list)
    """Ranks of the best layout's pipeline, each with the kind, start and end of its passes, in seconds."""


def draw_plan(picture: PlanPicture, kind: str) -> bytes:
    """The picture as a file.

    Args:
        picture: What is drawn.
        kind: ``svg`` or ``png``.
    """
    steps = picture.steps[:MOST_STEPS]
    names = [_names(list(picture.memory.values())), _names([parts for _, parts in steps])]
    ranks = _some(picture.pipeline)
    heights = [
        TITLE + len(picture.memory) * (BAR + GAP) + _legend_height(names[0]),
        TITLE + len(steps) * (LABEL + BAR + GAP) + AXIS + _legend_height(names[1]),
        TITLE + len(ranks) * (BAR + GAP) + AXIS + _legend_height(PASSES) if ranks else 0,
    ]
    height = TOP + sum(heights) + TITLE + CURVE_HEIGHT + 70
    make = SvgCanvas if kind == "svg" else PngCanvas
    canvas: Canvas = make(WIDTH, round(height), picture.title)
    canvas.text(16, 24, picture.title)
    y = float(TOP)
    y = _bars(
        canvas,
        y,
        f"usable memory of a device, {format_bytes(picture.room_bytes)}",
        list(picture.memory.items()),
        names[0],
        picture.room_bytes,
    )
    y = _bars(canvas, y, "the step, part by part", steps, names[1], None)
    if ranks:
        y = _timeline(canvas, y, ranks)
    _curve(canvas, y, picture)
    return canvas.finish()


def _names(parts: Sequence[dict[str, float]]) -> list[str]:
    """Every part that occurs, the largest first."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return sorted(totals, key=lambda name: -totals[name])


def _legend_height(names: Sequence[str]) -> float:
    return 22.0 * _legend_rows(names) + 18


def _legend_rows(names: Sequence[str]) -> int:
    return max(y for _, y, _ in _legend_places(names)) + 1 if names else 0


def _legend_places(names: Sequence[str]) -> list[tuple[float, int, str]]:
    x, row, places = 16.0, 0, []
    for name in names:
        width = len(name) * (ADVANCE + 1.2) + 30
        if x + width > WIDTH - 16:
            x, row = 16.0, row + 1
        places.append((x, row, name))
        x += width
    return places


def _bars(
    canvas: Canvas,
    y: float,
    title: str,
    rows: Sequence[tuple[str, dict[str, float]]],
    names: Sequence[str],
    limit: float | None,
) -> float:
    """Stacked bars; times in seconds, or bytes where there is a limit."""
    canvas.text(16, y + 14, title)
    y += TITLE
    longest = max([sum(parts.values()) for _, parts in rows] + ([limit] if limit else [0.0])) or 1.0
    span, top = WIDTH - LEFT - RIGHT, y
    shown = format_bytes if limit else format_seconds
    place = LEFT + limit / longest * span if limit else math.inf
    for label, parts in rows:
        if limit:
            canvas.text(LEFT - 8, y + 14, label, anchor="end")
        else:
            canvas.text(LEFT, y + 11, f"{label}")
            y += LABEL
        x = float(LEFT)
        for index, name in enumerate(names):
            width = max(0.0, parts.get(name, 0.0)) / longest * span
            if width > 0:
                canvas.rect(x, y, width, BAR, COLOURS[index % len(COLOURS)], f"{name}: {shown(parts[name])}")
                x += width
        words = shown(sum(parts.values()))
        crossed = x < place < x + 10 + len(words) * ADVANCE  # by the line of the limit
        canvas.text((place if crossed else x) + 6, y + 14, words)
        y += BAR + GAP
    if limit:
        canvas.line((place, top - 4), (place, y - GAP + 4), RED, 2)
    else:
        y = _seconds(canvas, y, longest)
    return _legend(canvas, y, names)


def _legend(canvas: Canvas, y: float, names: Sequence[str]) -> float:
    for x, row, name in _legend_places(names):
        canvas.rect(x, y + 22 * row + 4, 10, 10, COLOURS[names.index(name) % len(COLOURS)])
        canvas.text(x + 15, y + 22 * row + 13, name)
    return y + _legend_height(names)


def _seconds(canvas: Canvas, y: float, longest: float) -> float:
    """The axis of time below bars of so many seconds."""
    span = WIDTH - LEFT - RIGHT
    canvas.line((LEFT, y - 2), (LEFT + span, y - 2), INK)
    for tick in round_ticks(0.0, longest, about=8):
        if tick <= longest * 1.001:
            x = LEFT + tick / longest * span
            canvas.line((x, y - 2), (x, y + 2), INK)
            canvas.text(x, y + 14, format_seconds(tick) if tick else "0", anchor="middle")
    return y + AXIS


def _some(
    rows: list[tuple[str, list[tuple[str, float, float]]]],
) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """All ranks of a short pipeline, or some of a long one, the first and the last among them."""
    if len(rows) <= MOST_RANKS:
        return rows
    return [rows[round(n * (len(rows) - 1) / (MOST_RANKS - 1))] for n in range(MOST_RANKS)]


def _timeline(canvas: Canvas, y: float, ranks: list[tuple[str, list[tuple[str, float, float]]]]) -> float:
    """Passes of each rank over time; where several meet in a pixel, the one that fills most of it."""
    end = max(passes[-1][2] for _, passes in ranks)
    canvas.text(16, y + 14, "the pipeline of the first layout, as its schedule was walked")
    y += TITLE
    columns = WIDTH - LEFT - RIGHT
    for name, passes in ranks:
        canvas.text(LEFT - 8, y + 14, name, anchor="end")
        canvas.rect(LEFT, y, columns, BAR, GREY)
        filled = np.zeros((len(PASSES) + 1, columns))
        for kind, start, stop in passes:
            _fill(filled[PASSES.index(kind) + 1], start / end * columns, stop / end * columns)
        filled[0] = 1 - filled[1:].sum(axis=0)
        shown = np.argmax(filled, axis=0)
        edges = [0, *(np.flatnonzero(np.diff(shown)) + 1).tolist(), columns]
        for first, stop_at in itertools.pairwise(edges):
            if shown[first]:
                colour = COLOURS[int(shown[first]) - 1]
                canvas.rect(LEFT + first, y, stop_at - first, BAR, colour)
        y += BAR + GAP
    y = _seconds(canvas, y, end)
    return _legend(canvas, y, PASSES)


def _fill(row: npt.NDArray[np.float64], start: float, stop: float) -> None:
    """Add a stretch to the pixels that it covers, each by the part that it covers."""
    first, last = int(start), min(int(stop), len(row) - 1)
    if first >= last:
        row[min(first, len(row) - 1)] += stop - start
        return
    row[first] += first + 1 - start
    row[first + 1 : last] += 1
    row[last] += min(stop, len(row)) - last


def _curve(canvas: Canvas, y: float, picture: PlanPicture) -> None:
    """Speed of every layout that fits, best first, over its place on a logarithmic axis."""
    rates = np.sort(picture.rates)[::-1]
    canvas.text(16, y + 14, f"{picture.unit}/s a device of the {len(rates):,} layouts that fit, best first")
    top, bottom, left, right = y + TITLE, y + TITLE + CURVE_HEIGHT, 100.0, WIDTH - 30.0
    canvas.line((left, bottom), (right, bottom), INK)
    canvas.line((left, top), (left, bottom), INK)
    if not len(rates):
        return
    highest = float(rates[0])
    for share in (0.5, 1.0):
        place = bottom - share * CURVE_HEIGHT
        canvas.line((left, place), (right, place), GREY)
        canvas.text(
            left - 6, place + 4, format_rate(share * highest, "").replace("/s", "").strip(), anchor="end"
        )
    columns = int(right - left)
    spread = max(np.log10(len(rates)), 1e-9)
    for column in range(columns):
        place = min(len(rates) - 1, round(10 ** (column / columns * spread)) - 1)
        height = float(rates[place]) / highest * CURVE_HEIGHT
        canvas.rect(left + column, bottom - height, 1, max(height, 1), COLOURS[0])
    tick = 1
    while tick <= len(rates):
        x = left + (np.log10(tick) / spread if len(rates) > 1 else 0.0) * columns
        canvas.line((x, bottom), (x, bottom + 4), INK)
        canvas.text(x, bottom + 18, f"{tick:,}", anchor="middle")
        tick *= 10
