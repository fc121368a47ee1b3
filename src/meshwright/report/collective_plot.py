"""Pictures of collectives: a schedule step by step, and which algorithm is fastest where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.core.units import format_bytes
from meshwright.report.figure import COLORS, INK, add_axes, new_figure, style
from meshwright.schedule.collective.contributors import State, Transfer, list_transfers, trace_contributors
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from meshwright.simulate.collective_choice import CollectiveComparison

MOST_ROUNDS, MOST_RANKS = 40, 32
"""Limits of a picture; more steps are cut, more ranks refused."""
MOST_CELLS, MOST_LABELS = 64, 8
"""Chunks that have borders, and numbers."""
NARROW, WIDE, ROW, BOX = 74, 190, 78, 26
"""Least and largest width of a rank, height of a step and of a box, in pixels."""
COPY_COLOR, REDUCE_COLOR = COLORS[0], COLORS[1]


def draw_collective(schedule: CollectiveSchedule) -> Figure:
    """One row of boxes per step: the chunks of each rank, shaded by contributors; arrows are messages."""
    states, transfers = trace_contributors(schedule), list_transfers(schedule)
    shown = min(len(transfers), MOST_ROUNDS)
    per_chunk = 20 if schedule.chunks <= MOST_LABELS else 7
    width = max(NARROW, min(per_chunk * schedule.chunks + 24, WIDE))
    whole = max(660, schedule.ranks * width + 90)
    with style():
        figure = new_figure(whole, (shown + 1) * ROW + 92)
        axes = add_axes(figure, left=64, top=52, right=12, bottom=34)
        axes.set_xlim(-0.5, schedule.ranks - 0.5)
        axes.set_ylim((shown + 0.5) * ROW, -0.5 * ROW)
        axes.set_title(_title(schedule, shown, len(transfers)), pad=24)
        axes.xaxis.tick_top()
        axes.set_xticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
        names = ["start", *(f"step {at}" for at in range(shown))]
        axes.set_yticks([at * ROW for at in range(shown + 1)], names)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        for at in range(shown + 1):
            _draw_state(axes, schedule, states[at], at * ROW)
        for at in range(shown):
            _draw_transfers(axes, schedule, transfers[at], at * ROW)
        _draw_legend(axes, schedule)
    return figure


def _title(schedule: CollectiveSchedule, shown: int, rounds: int) -> str:
    cut = f", first {shown} of {rounds} steps" if shown < rounds else ""
    return f"{schedule.op} by {schedule.algorithm}, {schedule.ranks} ranks{cut}"


def _span(schedule: CollectiveSchedule, start: int, stop: int) -> tuple[float, float]:
    """Left edge and width of chunks in the box of a rank."""
    return -0.42 + 0.84 * start / schedule.chunks, 0.84 * (stop - start) / schedule.chunks


def _draw_state(axes: Axes, schedule: CollectiveSchedule, state: State, y: float) -> None:
    """The boxes of all ranks as two collections: many single patches are slow."""
    from matplotlib.collections import PolyCollection  # noqa: PLC0415  (an extra)
    from matplotlib.colors import to_rgba  # noqa: PLC0415

    reduces = any(len(has) > 1 for rank in state for has in rank.values())
    cells, colors = [], []
    for rank, held in enumerate(state):
        for chunk, has in held.items():
            left, width = _span(schedule, chunk, chunk + 1)
            cells.append(_box(rank + left, y, width))
            alpha = 0.25 + 0.65 * len(has) / schedule.ranks if reduces else 0.45
            colors.append(to_rgba(COLORS[2] if len(has) > 1 else COLORS[5], alpha))
            if schedule.chunks <= MOST_LABELS:
                text = f"Σ{len(has)}" if len(has) > 1 else str(min(has))
                axes.text(rank + left + width / 2, y, text, ha="center", va="center", fontsize=7)
    edge = 0.6 if schedule.chunks <= MOST_CELLS else 0.0
    axes.add_collection(PolyCollection(cells, facecolors=colors, edgecolors="white", linewidths=edge))
    frames = [_box(rank - 0.42, y, 0.84) for rank in range(schedule.ranks)]
    axes.add_collection(PolyCollection(frames, facecolors="none", edgecolors=INK, linewidths=0.7))


def _box(left: float, y: float, width: float) -> list[tuple[float, float]]:
    """The corners of a box around a height."""
    low, high = y - BOX / 2, y + BOX / 2
    return [(left, low), (left + width, low), (left + width, high), (left, high)]


def _draw_transfers(axes: Axes, schedule: CollectiveSchedule, transfers: list[Transfer], y: float) -> None:
    """Arrows from the middle of the sent chunks to the same chunks of the target, one row below."""
    for combine, color in ((Combine.REDUCE, REDUCE_COLOR), (Combine.COPY, COPY_COLOR)):
        chosen = [t for t in transfers if t.combine is combine]
        if not chosen:
            continue
        starts = [t.source - 0.42 + 0.42 * (t.start + t.stop) / schedule.chunks for t in chosen]
        axes.quiver(
            starts,
            [y + BOX / 2 + 1] * len(chosen),
            [t.target - t.source for t in chosen],
            [ROW - BOX - 2] * len(chosen),
            angles="xy", scale_units="xy", scale=1, color=color, units="dots", width=1.4, headwidth=5,
            headlength=6, headaxislength=5.5, zorder=3,
        )  # fmt: skip


def _draw_legend(axes: Axes, schedule: CollectiveSchedule) -> None:
    """What the picture has: added messages and sums of an operation that reduces; labels that are shown."""
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    combines = {r.combine for row in schedule.rows for step in row for r in step.receives}
    labelled = schedule.chunks <= MOST_LABELS
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=color, label=label)
        for combine, color, label in (
            (Combine.REDUCE, REDUCE_COLOR, "message, added"),
            (Combine.COPY, COPY_COLOR, "message, copied"),
        )
        if combine in combines
    ]
    one = "data of one rank: its number" if labelled else "data of one rank"
    handles.append(Patch(facecolor=COLORS[5], alpha=0.45, label=one))
    if Combine.REDUCE in combines:
        several = "Σ: sum of that many ranks" if labelled else "sum of ranks; darker: of more"
        handles.append(Patch(facecolor=COLORS[2], alpha=0.7, label=several))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=len(handles),
        fontsize=7,
        columnspacing=1.0,
        handlelength=1.4,
    )


def draw_comparison(found: CollectiveComparison) -> Figure:
    """The fastest algorithm by size and ranks; below it the times on the largest number of ranks."""
    names = list(dict.fromkeys(row.algorithm for row in found.rows))
    colors = dict(zip(names, COLORS, strict=False))
    ranks, sizes = found.ranks, found.sizes
    grid = 34 * len(ranks)
    with style():
        figure = new_figure(960, grid + 480)
        axes = add_axes(figure, left=96, top=34, right=20, bottom=410)
        axes.set_title(f"Fastest algorithm of {found.op} on {found.cluster} (simulated)")
        for y, count in enumerate(ranks):
            for x, size in enumerate(sizes):
                best = found.fastest(count, size)
                axes.barh(y, 1, left=x - 0.5, height=1, color=colors[best.algorithm], edgecolor="white")
                label = best.algorithm.replace("recursive_", "rec. ").replace("_", " ")
                axes.text(x, y, label, ha="center", va="center", fontsize=6, color="white")
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_ylim(-0.5, len(ranks) - 0.5)
        axes.set_yticks(range(len(ranks)), [f"{count} ranks" for count in ranks])
        axes.set_xticks(range(len(sizes)), [format_bytes(size) for size in sizes])
        axes.tick_params(length=0)
        _draw_times(add_axes(figure, left=96, top=grid + 120, right=190, bottom=52), found, colors)
    return figure


def _draw_times(axes: Axes, found: CollectiveComparison, colors: dict[str, str]) -> None:
    most = max(found.ranks)
    axes.set_title(f"Time on {most} ranks")
    axes.set_xlabel("size of the tensor (log)")
    axes.set_ylabel("microseconds (log)")
    axes.grid(True)
    for name, color in colors.items():
        rows = [row for row in found.rows if (row.ranks, row.algorithm) == (most, name)]
        if rows:
            times = [row.time_s * 1e6 for row in rows]
            axes.plot([row.size_bytes for row in rows], times, ".-", color=color, label=name)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks(found.sizes, [format_bytes(size) for size in found.sizes], fontsize=7)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
