"""A plan as a picture: memory by rank class against the device, the step by parts, speed over layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.core.units import format_bytes, format_rate, format_seconds
from meshwright.explain.canvas import ADVANCE, Canvas, PngCanvas, SvgCanvas

WIDTH, LEFT, RIGHT = 1040, 340, 90
BAR, GAP, TOP, TITLE = 20, 8, 40, 26
CURVE_HEIGHT = 150
MOST_STEPS = 6
COLOURS = (
    "#1f62b5", "#c05a00", "#2b7d4f", "#8e44ad", "#b5891f", "#6f7782",
    "#b3304c", "#2d9da6", "#7a8f2a", "#4a4f9c", "#a65d8c", "#3b4048",
)  # fmt: skip
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


def draw_plan(picture: PlanPicture, kind: str) -> bytes:
    """The picture as a file.

    Args:
        picture: What is drawn.
        kind: ``svg`` or ``png``.
    """
    steps = picture.steps[:MOST_STEPS]
    names = [_names(list(picture.memory.values())), _names([parts for _, parts in steps])]
    heights = [
        TITLE + len(picture.memory) * (BAR + GAP) + _legend_height(names[0]),
        TITLE + len(steps) * (BAR + GAP) + _legend_height(names[1]),
    ]
    height = TOP + sum(heights) + TITLE + CURVE_HEIGHT + 70
    make = SvgCanvas if kind == "svg" else PngCanvas
    canvas: Canvas = make(WIDTH, round(height), picture.title)
    canvas.text(16, 24, picture.title)
    y = float(TOP)
    y = _bars(
        canvas,
        y,
        f"memory of a device, {format_bytes(picture.room_bytes)}",
        list(picture.memory.items()),
        names[0],
        picture.room_bytes,
    )
    y = _bars(canvas, y, "the step, part by part", steps, names[1], None)
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
    for label, parts in rows:
        canvas.text(LEFT - 8, y + 14, _short(label), anchor="end")
        x = float(LEFT)
        for index, name in enumerate(names):
            width = max(0.0, parts.get(name, 0.0)) / longest * span
            if width > 0:
                canvas.rect(x, y, width, BAR, COLOURS[index % len(COLOURS)], f"{name}: {shown(parts[name])}")
                x += width
        canvas.text(x + 6, y + 14, shown(sum(parts.values())))
        y += BAR + GAP
    if limit:
        place = LEFT + limit / longest * span
        canvas.line((place, top - 4), (place, y - GAP + 4), RED, 2)
    for x, row, name in _legend_places(names):
        canvas.rect(x, y + 22 * row + 4, 10, 10, COLOURS[names.index(name) % len(COLOURS)])
        canvas.text(x + 15, y + 22 * row + 13, name)
    return y + _legend_height(names)


def _short(label: str, most: int = 52) -> str:
    return label if len(label) <= most else label[: most - 3] + "..."


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
