"""Predicted over measured as SVG: logarithmic axes, a colour a family, a band of 10% around equality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from meshwright.report.plot import PAPER, STYLE, TITLE_Y, Axis, Frame, format_value, log_ticks, tick_labels

COLOURS = (
    "#1f62b5", "#c05a00", "#2b7d4f", "#a3246f", "#6f7782",
    "#7a5cc4", "#0f8a8a", "#a58600", "#d1443b", "#4a6b1f",
)  # fmt: skip
SHAPES = ("circle", "square", "triangle")
"""A family is told by colour and shape together."""
WIDTH, HEIGHT, LEGEND = 640, 560, 190
"""Plot and legend, in pixels."""
BAND = 0.1

Dot = tuple[float, float, str]
"""Measured, predicted, and whose they are."""


@dataclass(frozen=True)
class Scatter:
    """What is drawn: dots of several families on the same two axes."""

    title: str
    x_label: str
    y_label: str
    families: Mapping[str, Sequence[Dot]]


def draw_scatter(scatter: Scatter) -> str:
    """The picture as a file of its own."""
    axis = _common_axis([value for dots in scatter.families.values() for dot in dots for value in dot[:2]])
    frame = Frame(WIDTH, HEIGHT, right=18)
    total = WIDTH + LEGEND
    parts = [
        (
            f'<svg class="mw-chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" '
            f'width="{total}" height="{HEIGHT}" role="img" aria-label="{escape(scatter.title)}">'
        ),
        f'<style>{STYLE}{PAPER}</style><rect class="mw-paper" width="100%" height="100%"/>',
        *_ground(scatter, frame, axis),
    ]
    for number, (name, dots) in enumerate(scatter.families.items()):
        parts += [
            _dot(number, frame.x(axis.place(x)), frame.y(axis.place(y)), _says(x, y, who))
            for x, y, who in dots
        ]
        height = frame.top + 18 * number
        parts.append(_dot(number, WIDTH + 8, height, name))
        parts.append(f'<text x="{WIDTH + 20}" y="{height + 4}">{escape(name)} ({len(dots)})</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _common_axis(values: Sequence[float]) -> Axis:
    low, high = (min(values) / 1.3, max(values) * 1.3) if values else (0.1, 10.0)
    return Axis(low, high, log_ticks(low, high), log=True)


def _ground(scatter: Scatter, frame: Frame, axis: Axis) -> list[str]:
    """Ticks, the line of equality with its band, and the names."""
    left, right, bottom, top = frame.x(0), frame.x(1), frame.y(0), frame.y(1)
    parts: list[str] = []
    for tick, label in zip(axis.ticks, tick_labels(axis.ticks), strict=True):
        x, y = frame.x(axis.place(tick)), frame.y(axis.place(tick))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{label}</text>')
        parts.append(f'<text x="{x}" y="{bottom + 19}" text-anchor="middle">{label}</text>')
    for factor, look in ((1.0, "frame"), (1 + BAND, "mark"), (1 / (1 + BAND), "mark")):
        first, last = max(axis.low, axis.low / factor), min(axis.high, axis.high / factor)
        ends = [(frame.x(axis.place(v)), frame.y(axis.place(v * factor))) for v in (first, last)]
        line = f'x1="{ends[0][0]}" y1="{ends[0][1]}" x2="{ends[1][0]}" y2="{ends[1][1]}"'
        parts.append(f'<line class="{look}" {line}/>')
    middle = (top + bottom) / 2
    parts += [
        f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>',
        f'<text class="t" x="12" y="{TITLE_Y}">{escape(scatter.title)}</text>',
        (
            f'<text x="{(left + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(scatter.x_label)}</text>"
        ),
        (
            f'<text x="15" y="{middle}" text-anchor="middle" transform="rotate(-90 15 {middle})">'
            f"{escape(scatter.y_label)}</text>"
        ),
    ]
    return parts


def _says(measured: float, predicted: float, who: str) -> str:
    error = predicted / measured - 1
    return f"{who}: {format_value(measured)} published, {format_value(predicted)} predicted ({error:+.1%})"


def _dot(family: int, x: float, y: float, says: str) -> str:
    colour, shape = COLOURS[family % len(COLOURS)], SHAPES[family // len(COLOURS) % len(SHAPES)]
    look = f'fill="{colour}" fill-opacity="0.75"'
    title = f"<title>{escape(says)}</title>"
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="3.4" {look}>{title}</circle>'
    if shape == "square":
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {look}>{title}</rect>'
    return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" {look}>{title}</path>'
