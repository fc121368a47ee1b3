"""Picture of a simulated step: one row per pp rank, with overlapped communication below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_seconds
from meshwright.layout.text import describe_layout
from meshwright.report.figure import INK, new_figure, require_picture, save_figure, style
from meshwright.report.plot import format_value
from meshwright.report.timeline import MAX_BARS
from meshwright.simulate.step import Lane, StepEvent, StepTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#2f76c9",
    "backward": "#2f9160",
    "input gradient": "#2f9160",
    "weight gradient": "#8cbf5a",
    "recompute": "#7d8590",
    "tensor parallel": "#d0700f",
    "context parallel": "#c2405c",
    "expert parallel": "#9b51b8",
    "sharded data parallel": "#b5891f",
    "pipeline transfers": "#2d9da6",
    "gradient reduction": "#e0a030",
    "data parallel": "#e0a030",
    "optimizer": "#5a60b4",
    "step overhead": "#8a6d3b",
    "uneven stages": "#b9bec6",
    "bubble": "#e3e6ea",
}
"""By name of an event, else by its part; in the order of the legend."""
WIDTH, ROW, THIN, TOP, BOTTOM, LEFT, RIGHT = 1080, 30, 16, 92, 44, 150, 20
"""Sizes in pixels; THIN is a row of overlapped communication."""
LABEL_WIDTH = 6.5
"""Pixels that a character in a bar needs."""
LEGEND_COLUMNS = 6


def draw_step(timeline: StepTimeline, path: Path, pp_ranks: Sequence[int] | None = None) -> None:
    """Draw some pp ranks, or all, into an SVG, PNG or PDF file.

    Raises:
        UserError: It is not a picture file, there are too many bars, or it cannot be written.
    """
    require_picture(path)
    lanes = [timeline.lane(rank) for rank in (timeline.pp_ranks if pp_ranks is None else pp_ranks)]
    bars = sum(len(lane.events) + sum(map(len, lane.overlapped.values())) for lane in lanes)
    if bars > MAX_BARS:
        rule = f"would have {bars:,} bars; at most {MAX_BARS:,} can be drawn"
        fix = "Choose ranks, such as --pp-ranks 0, or write --trace"
        raise UserError(Problem("picture-too-large", rule, path=str(path), fix=fix))
    save_figure(build_figure(timeline, lanes), path)


def build_figure(timeline: StepTimeline, lanes: Sequence[Lane]) -> Figure:
    """The lanes on one time axis."""
    from matplotlib.patches import Patch  # noqa: PLC0415  (an extra)

    heights = [ROW + THIN * len(lane.overlapped) + 8 for lane in lanes]
    total = TOP + sum(heights) + BOTTOM
    scale = (WIDTH - LEFT - RIGHT) / timeline.step_s
    with style():
        figure = new_figure(WIDTH, total)
        box = (LEFT / WIDTH, BOTTOM / total, 1 - (LEFT + RIGHT) / WIDTH, sum(heights) / total)
        axes = figure.add_axes(box)
        axes.set_xlim(0, timeline.step_s)
        axes.set_ylim(sum(heights), 0)
        ticks, top = [], 0.0
        for lane, height in zip(lanes, heights, strict=True):
            ticks += _draw_lane(axes, timeline, lane, top, scale)
            top += height
        axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
        axes.tick_params(axis="y", length=0, labelsize=7.5)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: format_value(value))
        axes.set_xlabel("time, s", loc="right")
        figure.text(16 / WIDTH, 1 - 20 / total, _title(timeline), fontsize=10, weight="bold")
        used = {_color_key(event) for lane in lanes for event in _all_events(lane)}
        handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name in used]
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(8 / WIDTH, 1 - 28 / total),
            ncols=LEGEND_COLUMNS, fontsize=7.5, columnspacing=1.2,
        )  # fmt: skip
    return figure


def _title(timeline: StepTimeline) -> str:
    plan = timeline.plan
    layout = describe_layout(plan.job.layout)
    return f"{plan.job.name}, {layout}: one step, {format_seconds(timeline.step_s)} (simulated)"


def _all_events(lane: Lane) -> list[StepEvent]:
    return [*lane.events, *(event for events in lane.overlapped.values() for event in events)]


def _color_key(event: StepEvent) -> str:
    return event.name if event.name in COLORS else event.part


def _draw_lane(
    axes: Axes, timeline: StepTimeline, lane: Lane, top: float, scale: float
) -> list[tuple[float, str]]:
    """Bars of a lane; returns where its rows are, and their names."""
    _draw_bars(axes, lane.events, top, ROW)
    for action in lane.actions:
        label = str(action.micro_batch)
        if action.duration_s * scale >= LABEL_WIDTH * len(label):
            middle = (action.start_s + action.end_s) / 2
            axes.text(
                middle, top + ROW / 2, label, ha="center", va="center_baseline", fontsize=7, color="white"
            )
    ticks = [(top + ROW / 2, timeline.name_of(lane.pp_rank))]
    for number, (axis, events) in enumerate(lane.overlapped.items()):
        below = top + ROW + THIN * number + 2
        _draw_bars(axes, events, below, THIN - 4)
        ticks.append((below + THIN / 2 - 2, f"overlapped, {axis}"))
    return ticks


def _draw_bars(axes: Axes, events: Sequence[StepEvent], top: float, height: float) -> None:
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        spans.setdefault(_color_key(event), []).append((event.start_s, event.duration_s))
    for name, found in spans.items():
        axes.broken_barh(
            found,
            (top, height),
            color=COLORS[name],
            linewidth=0.4,
            edgecolor="white" if height >= ROW else INK,
        )
