"""Writes timelines as a picture: one, or two above each other."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.report.timeline import (
    MOST_BARS,
    Timeline,
    draw_pair_png,
    draw_pair_svg,
    draw_png,
    draw_svg,
)


def write_timelines(out: Path, timeline: Timeline, lower: Timeline | None = None) -> None:
    """Draw into an .svg or .png file.

    Raises:
        UserError: It is neither, there is too much to draw, or it cannot be written.
    """
    bars = sum(len(row) for _, row in timeline.rows)
    kind = out.suffix.lower()
    rule, fix = "", ""
    if kind not in (".svg", ".png"):
        rule, fix = "is neither an .svg nor a .png file", f"Use -o {out.with_suffix('.svg')}"
    elif bars > MOST_BARS:
        rule, fix = f"would have {bars:,} bars; {MOST_BARS:,} at most", "Use fewer stages or micro-batches"
    else:
        try:
            out.write_bytes(_draw(kind, timeline, lower))
        except OSError as error:
            rule, fix = f"cannot be written: {error.strerror}", "Name another file with -o"
    if rule:
        raise UserError(Problem("schedule-picture", rule, path=str(out), fix=fix))


def _draw(kind: str, timeline: Timeline, lower: Timeline | None) -> bytes:
    if lower is None:
        return draw_png(timeline) if kind == ".png" else draw_svg(timeline).encode()
    return draw_pair_png(timeline, lower) if kind == ".png" else draw_pair_svg(timeline, lower).encode()
