"""Predicted against measured: logarithmic axes, one colour and marker per family, a band of 10%."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.report.figure import COLORS, INK, add_axes, new_figure, style
from meshwright.report.plot import format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D")
"""The marker changes after each round of colours."""
BAND = 0.1
WIDTH, HEIGHT, LEGEND = 620, 560, 200
"""Axes and legend, in pixels."""


@dataclass(frozen=True)
class Scatter:
    """Points of several families on the same two axes."""

    title: str
    x_label: str
    y_label: str
    families: Mapping[str, Sequence[tuple[float, float]]]
    """Measured and predicted values by family."""


def draw_scatter(scatter: Scatter) -> Figure:
    """The scatter plot as a figure."""
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415  (an extra)

    values = [value for points in scatter.families.values() for point in points for value in point]
    low, high = (min(values) / 1.3, max(values) * 1.3) if values else (0.1, 10.0)
    with style():
        figure = new_figure(WIDTH + LEGEND, HEIGHT)
        axes = add_axes(figure, left=70, top=36, right=LEGEND, bottom=44)
        axes.set_title(scatter.title)
        axes.set_xlabel(scatter.x_label)
        axes.set_ylabel(scatter.y_label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.fill_between(
            [low, high],
            [low / (1 + BAND), high / (1 + BAND)],
            [low * (1 + BAND), high * (1 + BAND)],
            color=INK,
            alpha=0.1,
            linewidth=0,
            label=f"within {BAND:.0%}",
        )
        axes.plot([low, high], [low, high], color=INK, linewidth=0.9)
        for number, (name, points) in enumerate(scatter.families.items()):
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                s=14,
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number // len(COLORS) % len(MARKERS)],
                alpha=0.8,
                linewidths=0,
                label=f"{name} ({len(points)})",
            )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value)))
        axes.grid()
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=7.5)
    return figure
