"""The generations of a run on one time axis: start-up, training, and recovery from failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.audit.goodput import GenerationTimes
from meshwright.report.figure import INK, new_figure, style
from meshwright.report.plot import format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPAN_COLORS = {"start-up": "#7d8590", "recovery": "#c2405c", "training": "#2f76c9"}
MAX_ROWS = 30
"""Generations that are drawn: the last ones."""
WIDTH, ROW, TOP, BOTTOM, LEFT, RIGHT = 1080, 24, 38, 44, 110, 16
"""Sizes in pixels."""
LABEL_PIXELS = 6.0
"""Width of a character in a bar."""

Span = tuple[str, float, float]
"""Kind, begin and end."""


def list_spans(generations: Sequence[GenerationTimes]) -> list[tuple[GenerationTimes, list[Span]]]:
    """The spans of each generation, in seconds; the time between two commands is left out."""
    found: list[tuple[GenerationTimes, list[Span]]] = []
    zero = reached = 0.0
    before: GenerationTimes | None = None
    for times in generations:
        goes_on = before is not None and before.command == times.command
        begin = times.began
        if before is not None and goes_on:
            begin = before.ended if before.worked is None else before.worked
            kind, start, _ = found[-1][1][-1]
            found[-1][1][-1] = (kind, start, begin - zero)
        else:
            zero = begin - reached
        ready = times.ended if times.ready is None else times.ready
        spans = [("recovery" if goes_on else "start-up", begin - zero, ready - zero)]
        if times.ready is not None:
            spans.append(("training", ready - zero, times.ended - zero))
        reached = max(reached, times.ended - zero)
        found.append((times, spans))
        before = times
    return found


def draw_generations(generations: Sequence[GenerationTimes]) -> Figure:
    """One row per generation, with the steps that it did."""
    from matplotlib.patches import Patch  # noqa: PLC0415  (an extra)

    rows = list_spans(generations)[-MAX_ROWS:]
    height = TOP + BOTTOM + ROW * len(rows)
    end = max(span[2] for _, spans in rows for span in spans) or 1.0
    with style():
        figure = new_figure(WIDTH, height)
        plot_width = WIDTH - LEFT - RIGHT
        axes = figure.add_axes((LEFT / WIDTH, BOTTOM / height, plot_width / WIDTH, ROW * len(rows) / height))
        for number, (times, spans) in enumerate(rows):
            axes.axhspan(number - 0.4, number + 0.4, color=INK, alpha=0.08, linewidth=0)
            for kind, begin, stop in spans:
                bar = [(begin, max(stop - begin, end / plot_width))]
                axes.broken_barh(bar, (number - 0.4, 0.8), color=SPAN_COLORS[kind], linewidth=0)
            label = f"steps {times.first_step + 1} to {times.last_step}"
            _, begin, stop = spans[-1]
            if times.last_step > times.first_step and (stop - begin) / end * plot_width > LABEL_PIXELS * len(
                label
            ):
                axes.text(
                    (begin + stop) / 2, number, label, ha="center", va="center", fontsize=7, color="white"
                )
        axes.set_xlim(0, end)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [f"generation {times.generation}" for times, _ in rows])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: format_value(value))
        axes.set_xlabel("seconds, without the time between commands", loc="right")
        axes.set_title("Generations", pad=8)
        used = {kind for _, spans in rows for kind, _, _ in spans}
        handles = [Patch(color=color, label=kind) for kind, color in SPAN_COLORS.items() if kind in used]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
    return figure
