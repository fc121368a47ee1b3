"""A plan as a picture: memory per rank class, step time by part, the pipeline, throughput of all layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from meshwright.core.units import format_bytes, format_count, format_seconds
from meshwright.layout.text import describe_layout
from meshwright.plan.contract import PlanContract, RankPrediction
from meshwright.plan.memory.fit import MemoryNeed
from meshwright.plan.search.find import SearchResult
from meshwright.plan.time.pipeline import walk_pipeline
from meshwright.report.figure import COLORS, INK, new_figure, style
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, LEFT, RIGHT = 1040, 100, 30
"""In pixels; the left margin is wider for long names of ranks."""
CHARACTER, LONGEST_NAME = 6.6, 30
"""Pixels of a character of a tick label, and the most characters of one."""
BAR, HEAD, FOOT, LEGEND_LINE = 28, 34, 34, 18
"""Heights in pixels: a bar with its gap, a panel's title, its axis, one line of a legend."""
CURVE_HEIGHT = 150
MAX_LAYOUTS, MAX_RANKS = 6, 8
LEGEND_COLUMNS = 5
PASS_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
PASS_COLORS = {"forward": "#2f76c9", "backward": "#2f9160", "weight gradient": "#d0700f"}
LIMIT_COLOR = "#c2405c"
OTHER, SMALL = "other", 0.01
"""Parts that are smaller than this share of the longest bar in every bar are drawn as one."""
MAX_PASSES = 100
"""Passes of a rank side by side in half of the picture's width; thinner ones cannot be told apart."""


@dataclass(frozen=True)
class PlanPicture:
    """The values of a plan's picture."""

    title: str
    memory: dict[str, dict[str, float]]
    """Bytes by rank class and line."""
    room_bytes: float
    """Usable memory of a device."""
    steps: list[tuple[str, dict[str, float]]]
    """Layouts, best first, each with the seconds of its parts."""
    rates: npt.NDArray[np.float64]
    """Estimated tokens per second and device of every layout that may fit, in any order."""
    checked: str
    """How many layouts were checked, and how many of them fit."""
    unit: str = "tokens"
    pipeline: list[tuple[str, list[tuple[str, float, float]]]] = field(default_factory=list)
    """Ranks of the best layout's pipeline, each with the kind, start and end of its passes, in seconds."""


def gather_picture(plan: PlanContract, found: SearchResult) -> PlanPicture:
    """Collect the values of the picture from a plan and its search."""
    job = plan.job
    device_s = (
        np.concatenate(found.rates)
        if found.rates
        else np.array([p.step_s * p.layout.world_size for p in found.best])
    )
    return PlanPicture(
        title=f"{job.name}: {describe_layout(job.layout)}",
        memory={name.partition(" (")[0]: _memory_bar(job, rank) for name, rank in plan.classes().items()},
        room_bytes=plan.usable_bytes,
        steps=[(describe_layout(p.layout), p.time.parts) for p in found.best],
        rates=plan.tokens_per_step / device_s,
        checked=f"{found.checked:,} checked, {len(found.best):,} of them fit",
        unit=job.unit,
        pipeline=_planned_passes(plan),
    )


def _memory_bar(job: Job, rank: RankPrediction) -> dict[str, float]:
    """Memory of a rank: the lines of a steady step, and what is needed on top."""
    need = MemoryNeed.of(job, rank.peak_bytes, rank.first_peak_bytes)
    bar = {line.name: float(line.bytes) for line in rank.lines}
    more = {
        f"{need.limited_by}, above the steady step": max(need.peaks.values()) - need.steady_step,
        "allocator": need.allocator,
        "context": need.context,
    }
    return bar | {name: float(size) for name, size in more.items() if size}


def _planned_passes(plan: PlanContract) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Passes of each pp rank in the simulated schedule; none without a pipeline."""
    if plan.pipeline is None:
        return []
    schedule, walk = walk_pipeline(plan.job, plan.micro_batches, plan.pipeline)
    return [
        (
            f"pp rank {rank}",
            [(PASS_NAMES[a.kind.value], s, e) for a, s, e in zip(row, starts, ends, strict=True)],
        )
        for rank, (row, starts, ends) in enumerate(zip(schedule.ranks, walk.start_s, walk.end_s, strict=True))
    ]


def draw_plan(picture: PlanPicture) -> Figure:
    """The picture as a figure."""
    steps = picture.steps[:MAX_LAYOUTS]
    memory = _fold_small(list(picture.memory.items()))
    lines, parts = _sorted_names([bar for _, bar in memory]), _sorted_names([bar for _, bar in steps])
    memory = [(_shorten(name), bar) for name, bar in memory]
    left = max(LEFT, *(16 + CHARACTER * len(name) for name, _ in memory))
    ranks = _sample(picture.pipeline)
    panels = [
        (BAR * len(memory), _legend_height(lines)),
        (2 * BAR * len(steps), _legend_height(parts)),
        *([(BAR * len(ranks), LEGEND_LINE)] if ranks else []),
        (CURVE_HEIGHT, 0),
    ]
    total = sum(HEAD + height + FOOT + legend for height, legend in panels) + HEAD + 14
    with style():
        figure = new_figure(WIDTH, total)
        figure.text(16 / WIDTH, 1 - 22 / total, picture.title, fontsize=11, weight="bold")
        axes, top = [], total - HEAD
        for height, legend in panels:
            top -= HEAD + height
            box = (left / WIDTH, top / total, 1 - (left + RIGHT) / WIDTH, height / total)
            axes.append(figure.add_axes(box))
            top -= FOOT + legend
        _draw_memory(axes[0], memory, lines, picture.room_bytes)
        _draw_steps(axes[1], steps, parts)
        if ranks:
            _draw_pipeline(axes[2], ranks)
        _draw_rates(axes[-1], picture)
    return figure


def _shorten(name: str) -> str:
    """The name of ranks without the middle of a long list of stages."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME * 2 // 3].rpartition(',')[0]}, ..., {name.rpartition(', ')[2]}"


def _fold_small(bars: Sequence[tuple[str, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """The bars with their small parts as one, so that a legend names what can be seen."""
    least = SMALL * max((sum(bar.values()) for _, bar in bars), default=0.0)
    large = {name for _, bar in bars for name, size in bar.items() if size >= least}
    if len({name for _, bar in bars for name in bar} - large) < 2:
        return list(bars)
    folded = []
    for title, bar in bars:
        rest = sum(size for name, size in bar.items() if name not in large)
        folded.append((title, {name: size for name, size in bar.items() if name in large} | {OTHER: rest}))
    return folded


def _sorted_names(bars: Sequence[dict[str, float]]) -> list[str]:
    """Every part that occurs, the largest first and the small ones last."""
    totals: dict[str, float] = {}
    for bar in bars:
        for name, value in bar.items():
            totals[name] = totals.get(name, 0.0) + value
    return sorted(totals, key=lambda name: (name == OTHER, -totals[name]))


def _legend_height(names: Sequence[str]) -> int:
    return LEGEND_LINE * -(-len(names) // LEGEND_COLUMNS)


def _sample(
    rows: list[tuple[str, list[tuple[str, float, float]]]],
) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """All ranks of a short pipeline; of a long one some, the first and the last among them."""
    if len(rows) <= MAX_RANKS:
        return rows
    return [rows[round(n * (len(rows) - 1) / (MAX_RANKS - 1))] for n in range(MAX_RANKS)]


def _stack(
    axes: Axes, places: Sequence[float], bars: Sequence[dict[str, float]], names: Sequence[str]
) -> None:
    """Horizontal stacked bars, and their legend below the axis."""
    left = np.zeros(len(bars))
    for index, name in enumerate(names):
        sizes = np.array([max(0.0, bar.get(name, 0.0)) for bar in bars])
        axes.barh(places, sizes, left=left, height=0.72, color=COLORS[index % len(COLORS)], label=name)
        left += sizes
    _legend_below(axes)
    axes.tick_params(axis="y", length=0)


def _legend_below(axes: Axes) -> None:
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.09, -FOOT / 1.35 / axes.bbox.height),
        ncols=LEGEND_COLUMNS,
        fontsize=7.5,
        borderaxespad=0,
    )


def _draw_memory(
    axes: Axes, memory: list[tuple[str, dict[str, float]]], lines: list[str], room: float
) -> None:
    _stack(axes, range(len(memory)), [bar for _, bar in memory], lines)
    axes.set_yticks(range(len(memory)), [name for name, _ in memory])
    axes.set_ylim(len(memory) - 0.5, -0.5)
    axes.axvline(room, color=LIMIT_COLOR, linewidth=1.8)
    largest = max([room, *(sum(bar.values()) for _, bar in memory)])
    axes.set_xlim(0, largest * 1.12)
    for place, (_, bar) in enumerate(memory):
        size = sum(bar.values())
        crossed = size < room < size + largest * 0.1  # the limit's line would cross the figure
        axes.annotate(
            format_bytes(size), (room if crossed else size, place), (5, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value) if value else "0")
    axes.set_title(f"Memory per rank by kind; red line: usable memory per device, {format_bytes(room)}")


def _draw_steps(axes: Axes, steps: list[tuple[str, dict[str, float]]], parts: list[str]) -> None:
    places = [2 * n + 1 for n in range(len(steps))]
    _stack(axes, places, [bar for _, bar in steps], parts)
    axes.set_yticks([])
    axes.set_ylim(2 * len(steps) - 0.4, -0.4)
    axes.set_xlim(0, max([sum(bar.values()) for _, bar in steps], default=1.0) * 1.12 or 1.0)
    for place, (name, bar) in zip(places, steps, strict=True):
        axes.annotate(name, (0, place - 0.85), (2, 0), textcoords="offset points", va="center")
        seconds = sum(bar.values())
        axes.annotate(
            format_seconds(seconds), (seconds, place), (5, 0), textcoords="offset points", va="center"
        )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axes.set_title("Step time by part, recommended layout first")


def _draw_pipeline(axes: Axes, ranks: list[tuple[str, list[tuple[str, float, float]]]]) -> None:
    """The whole step, or its start and its end if it has too many passes."""
    end = max(passes[-1][2] for _, passes in ranks)
    span = end * MAX_PASSES / max(len(passes) for _, passes in ranks)
    title = "Pipeline of the recommended layout, simulated"
    if 2 * span >= end:
        _draw_passes(axes, ranks, 0.0, end)
    else:
        title += f": the first and the last {format_seconds(span)} of {format_seconds(end)}"
        axes.axis("off")
        _draw_passes(axes.inset_axes((0, 0, 0.48, 1)), ranks, 0.0, span)
        last = axes.inset_axes((0.52, 0, 0.48, 1))
        _draw_passes(last, ranks, end - span, end)
        last.set_yticks([])
        last.spines["left"].set_visible(False)
    axes.set_title(title)
    for kind, color in PASS_COLORS.items():
        if any(name == kind for _, passes in ranks for name, _, _ in passes):
            axes.bar(0, 0, color=color, label=kind)  # an entry of the legend
    _legend_below(axes)


def _draw_passes(
    axes: Axes, ranks: list[tuple[str, list[tuple[str, float, float]]]], begin: float, end: float
) -> None:
    """The passes of each rank between two times."""
    for number, (_, passes) in enumerate(ranks):
        axes.axhspan(number - 0.38, number + 0.38, color=INK, alpha=0.08, linewidth=0)
        for kind, color in PASS_COLORS.items():
            spans = [(s, e - s) for name, s, e in passes if name == kind and e > begin and s < end]
            if spans:
                axes.broken_barh(
                    spans, (number - 0.38, 0.76), facecolor=color, edgecolor="white", linewidth=0.5
                )
    axes.set_yticks(range(len(ranks)), [name for name, _ in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(begin, end)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")


def _draw_rates(axes: Axes, picture: PlanPicture) -> None:
    """Throughput of every layout that may fit, best first, on a logarithmic axis."""
    rates = np.sort(picture.rates)[::-1]
    count = f"{len(rates):,} layouts that may fit by the memory bound ({picture.checked})"
    axes.set_title(f"Estimated {picture.unit}/s per device: {count}")
    if not len(rates):
        return
    if len(rates) == 1:
        axes.bar([1], rates, color=COLORS[0])
        axes.set(xlim=(0, 10), xticks=[1])
    else:
        shown = np.unique(np.geomspace(1, len(rates), 900).round().astype(int))
        axes.fill_between(shown, rates[shown - 1], step="post", color=COLORS[0], linewidth=0)
        axes.set(xscale="log", xlim=(0.9, len(rates) * 1.02))
    axes.set_ylim(0, float(rates[0]) * 1.05)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: format_count(value) if value else "0")
    axes.set_xlabel("position of the layout, fastest first")
    axes.grid(axis="y")
