"""Simulated failures: goodput over the checkpoint interval and the spare nodes, and lost time by reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.report.figure import COLORS, INK, add_axes, new_figure, style
from meshwright.simulate.choices import best_interval, best_spares
from meshwright.simulate.months import FailureSimulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, BAR = 960, 380, 150
"""Size of the two curves, and height of the bar below them, in pixels."""
NEAR = 0.9
"""Numbers of spares are drawn from the first with this share of the best."""
LEAST_SPAN = 0.5
"""Smallest range of the goodput axis, in percent: smaller differences look as small as they are."""


def draw_failures(found: FailureSimulation) -> Figure:
    """The curves of intervals and spares above the bar of lost time."""
    with style():
        figure = new_figure(WIDTH, HEIGHT + BAR)
        half = WIDTH // 2
        _draw_intervals(add_axes(figure, left=64, top=34, right=half + 12, bottom=BAR + 84), found)
        _draw_spares(add_axes(figure, left=half + 56, top=34, right=20, bottom=BAR + 84), found)
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
    _widen(axes)
    _add_legend(axes)


def _draw_spares(axes: Axes, found: FailureSimulation) -> None:
    """Spare nodes: goodput, and useful work per paid device; the steep beginning is left out."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  (an extra)

    best = best_spares(found.spares)
    points = [p for p in found.spares if p.per_device >= NEAR * best.per_device] or list(found.spares)
    axes.set_title("Spare nodes")
    axes.set_xlabel("spare nodes")
    axes.set_ylabel("mean in %")
    axes.grid(True)
    numbers = [point.spares for point in points]
    axes.plot(numbers, [100 * p.goodput for p in points], ".-", color=COLORS[0], label="goodput")
    paid = "useful work per paid device"
    axes.plot(numbers, [100 * p.per_device for p in points], ".-", color=COLORS[3], label=paid)
    axes.axvline(found.model.spares, color=COLORS[1], linestyle="--", label=f"used: {found.model.spares}")
    label = f"best of {len(found.spares)} tried: {best.spares}"
    axes.plot([best.spares], [100 * best.per_device], "o", color=COLORS[2], label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.ticklabel_format(axis="y", useOffset=False)
    _widen(axes)
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    """Below the axis, two columns."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=7.5)


def _widen(axes: Axes) -> None:
    low, high = axes.get_ylim()
    missing = max(0.0, LEAST_SPAN - (high - low))
    axes.set_ylim(low - 0.8 * missing, high + 0.2 * missing)


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
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.75), ncols=6, fontsize=7.5)
