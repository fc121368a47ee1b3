"""Simulated failures: goodput over the checkpoint interval, and the time lost by reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.report.figure import COLORS, INK, add_axes, new_figure, style
from meshwright.simulate.choices import best_interval
from meshwright.simulate.months import FailureSimulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, BAR = 720, 340, 150
"""Of the curve, and height of the bar below it, in pixels."""
LEAST_SPAN = 0.5
"""Of the goodput axis, in percent: smaller differences look as small as they are."""


def draw_failures(found: FailureSimulation) -> Figure:
    """The curve of the intervals above the bar of lost time."""
    with style():
        figure = new_figure(WIDTH, HEIGHT + BAR)
        _draw_intervals(add_axes(figure, left=64, top=34, right=20, bottom=BAR + 46), found)
        _draw_losses(add_axes(figure, left=64, top=HEIGHT + 34, right=20, bottom=74), found)
    return figure


def _draw_intervals(axes: Axes, found: FailureSimulation) -> None:
    days = found.model.wall_s / 86_400
    axes.set_title(f"Goodput over the checkpoint interval, {days:g} days")
    axes.set_xlabel("minutes of training between checkpoints (log)")
    axes.set_ylabel("mean goodput in %")
    axes.grid(True)
    points = found.intervals
    minutes = [point.interval_s / 60 for point in points]
    axes.plot(minutes, [100 * point.goodput for point in points], color=COLORS[0], label="simulated")
    used = found.model.interval_s / 60
    axes.axvline(used, color=COLORS[1], linestyle="--", label=f"used: {used:.3g} min")
    best = best_interval(points)
    label = f"best of {len(points)} tried: {best.interval_s / 60:.3g} min"
    axes.plot([best.interval_s / 60], [100 * best.goodput], "o", color=COLORS[2], label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.ticklabel_format(axis="y", useOffset=False)
    low, high = axes.get_ylim()
    missing = max(0.0, LEAST_SPAN - (high - low))
    axes.set_ylim(low - 0.8 * missing, high + 0.2 * missing)
    axes.legend(loc="lower left", bbox_to_anchor=(0.12, 0))  # left of the middle, where the lines meet


def _draw_losses(axes: Axes, found: FailureSimulation) -> None:
    total = found.model.wall_s / 3600
    reached = 0.0
    for number, (reason, hours) in enumerate(found.lost_hours.items()):
        share = 100 * hours.mean / total
        if share <= 0 and reached:
            continue
        label = f"{reason} {share:.2g}%"
        axes.barh([0], [share], left=reached, color=COLORS[number], height=0.7, label=label)
        reached += share
    axes.set_title(f"Lost time: {reached:.1f}%")
    axes.set_xlabel("% of the time", color=INK)
    axes.set_yticks([])
    axes.set_xlim(0, reached or 1.0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.75), ncols=4, fontsize=7.5)
