"""Pipeline timelines: one row per rank, one bar per action, from a simulated schedule or from measured times.

A timeline is data. It is drawn here through matplotlib, alone or two above each other on one time axis, and
as text in ``timeline_text.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import Problem, UserError
from meshwright.report.figure import INK, new_figure, require_picture, save_figure, style
from meshwright.report.plot import format_value
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.walk import Walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}
KIND_COLORS = {Kind.FORWARD: "#2f76c9", Kind.BACKWARD: "#2f9160", Kind.WEIGHT: "#d0700f"}
MAX_BARS = 20_000
"""A picture with more bars is too large for a browser, and its bars are thinner than a pixel."""
WIDTH, ROW, TOP, BOTTOM, LEFT, RIGHT = 960, 28, 62, 44, 64, 16
"""Sizes in pixels."""
LABEL_WIDTH = 6.5
"""Pixels that a character in a bar needs."""
LATER_ALPHA = 0.72
"""Opacity of a rank's second and further virtual stages."""


@dataclass(frozen=True)
class Bar:
    """One action of a rank."""

    start: float
    end: float
    label: str
    kind: Kind
    chunk: int = 0
    """Index of the rank's virtual stage; later ones are drawn lighter."""


@dataclass(frozen=True)
class Timeline:
    """Rows of bars with a title."""

    title: str
    note: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    """The name of each row and its bars in order of time."""
    unit: str = ""
    """Unit of the times; empty if the user gave them without one."""

    @property
    def end(self) -> float:
        """When the last bar ends."""
        return max((bar.end for _, bars in self.rows for bar in bars), default=0.0)

    @property
    def bars(self) -> int:
        """Number of bars."""
        return sum(len(row) for _, row in self.rows)


def build_timeline(schedule: PipelineSchedule, walk: Walk, title: str, note: str, unit: str = "") -> Timeline:
    """The timeline of a simulated schedule."""
    rows = [
        tuple(_bar(schedule, *timed) for timed in zip(row, starts, ends, strict=True))
        for row, starts, ends in zip(schedule.ranks, walk.start_s, walk.end_s, strict=True)
    ]
    return Timeline(title, note, _named(rows), unit)


def measured_timeline(
    schedule: PipelineSchedule, spans: Sequence[Sequence[tuple[Action, float, float]]], title: str, note: str
) -> Timeline:
    """The timeline of a run, counted from the first start of all ranks.

    Args:
        schedule: The schedule that ran; it maps stages to ranks.
        spans: For each rank its actions with start and end in seconds, on a clock that all ranks share, in
            any order.
        title: Title of the picture.
        note: Line below the title.
    """
    first = min((start for row in spans for _, start, _ in row), default=0.0)
    rows = [
        tuple(_bar(schedule, action, start - first, end - first) for action, start, end in ordered)
        for ordered in (sorted(row, key=lambda span: span[1]) for row in spans)
    ]
    return Timeline(title, note, _named(rows), unit="s")


def _named(rows: Sequence[tuple[Bar, ...]]) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    return tuple((f"rank {rank}", bars) for rank, bars in enumerate(rows))


def _bar(schedule: PipelineSchedule, action: Action, start: float, end: float) -> Bar:
    chunk = schedule.stages_of(schedule.rank_of(action.stage)).index(action.stage)
    letter = chr(ord("a") + chunk % 26) if schedule.virtual_stages > 1 else ""
    return Bar(start, end, f"{action.micro_batch}{letter}", action.kind, chunk)


def write_timelines(path: Path, *timelines: Timeline) -> None:
    """Draw timelines above each other into an SVG, PNG or PDF file.

    Raises:
        UserError: It is not a picture file, there are too many bars, or it cannot be written.
    """
    bars = sum(timeline.bars for timeline in timelines)
    if bars > MAX_BARS:
        rule = f"would have {bars:,} bars; at most {MAX_BARS:,} can be drawn"
        fix = "Use fewer stages or micro-batches"
        raise UserError(Problem("picture-too-large", rule, path=str(path), fix=fix))
    require_picture(path)
    save_figure(draw_timelines(*timelines), path)


def draw_timelines(*timelines: Timeline) -> Figure:
    """Timelines above each other on one time axis."""
    from matplotlib.patches import Patch  # noqa: PLC0415  (an extra)

    heights = [TOP + ROW * max(1, len(timeline.rows)) for timeline in timelines]
    total = sum(heights) + BOTTOM
    end = max(timeline.end for timeline in timelines) or 1.0
    with style():
        figure = new_figure(WIDTH, total)
        below = float(total)
        for timeline, height in zip(timelines, heights, strict=True):
            below -= height
            box = (LEFT / WIDTH, below / total, 1 - (LEFT + RIGHT) / WIDTH, (height - TOP) / total)
            axes = figure.add_axes(box)
            _draw_rows(axes, timeline, (WIDTH - LEFT - RIGHT) / end)
            axes.set_xlim(0, end)
            axes.annotate(
                timeline.note, (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points",
                fontsize=7.5,
            )  # fmt: skip
            axes.set_title(timeline.title, pad=16)
            axes.tick_params(labelbottom=False, bottom=False)
        axes.tick_params(labelbottom=True, bottom=True)
        axes.xaxis.set_major_formatter(lambda value, _: format_value(value))
        axes.set_xlabel(f"time, {timelines[0].unit}" if timelines[0].unit else "time", loc="right")
        used = {bar.kind for timeline in timelines for _, bars in timeline.rows for bar in bars}
        handles = [Patch(color=KIND_COLORS[kind], label=KIND_NAMES[kind]) for kind in Kind if kind in used]
        figure.axes[0].legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2
        )
    return figure


def _draw_rows(axes: Axes, timeline: Timeline, scale: float) -> None:
    """Bars of each row; a label where it fits."""
    axes.set_ylim(len(timeline.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.rows)), [name for name, _ in timeline.rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for number, (_, bars) in enumerate(timeline.rows):
        axes.axhspan(number - 0.42, number + 0.42, color=INK, alpha=0.08, linewidth=0)
        for kind in Kind:
            for later in (False, True):
                spans = [
                    (bar.start, (bar.end - bar.start) - min(1.0 / scale, (bar.end - bar.start) / 4))
                    for bar in bars
                    if bar.kind is kind and (bar.chunk > 0) is later
                ]
                if spans:
                    alpha = LATER_ALPHA if later else 1.0
                    color = KIND_COLORS[kind]
                    axes.broken_barh(spans, (number - 0.42, 0.84), color=color, alpha=alpha, linewidth=0)
        for bar in bars:
            if (bar.end - bar.start) * scale >= LABEL_WIDTH * len(bar.label):
                middle = (bar.start + bar.end) / 2
                axes.text(
                    middle, number, bar.label, ha="center", va="center_baseline", fontsize=7, color="white"
                )
