"""``meshwright schedule pipeline``: generates, proves, walks and draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from meshwright.cli.output import Output
from meshwright.core.errors import CheckFailedError, Problem, UserError
from meshwright.explain.plot import format_value
from meshwright.explain.timeline import MOST_BARS, Timeline, build_timeline, draw_rows, draw_svg
from meshwright.schedule.actions import Kind, PipelineSchedule
from meshwright.schedule.build import build_schedule
from meshwright.schedule.closed_forms import pipeline_time
from meshwright.schedule.proof import Proof, prove_schedule
from meshwright.schedule.walk import StageTimes, Walk, walk_schedule

COLOURS = {Kind.FORWARD: "white on blue", Kind.BACKWARD: "white on green", Kind.WEIGHT: "black on yellow"}
MOST_TEXT_ROWS = 64
"""More ranks than this are not drawn as text."""


@dataclass(frozen=True)
class TimeTexts:
    """Times as they stand on the command line: a number, or one for each stage with commas."""

    forward: str = "1"
    backward: str = "2"
    """The whole backward pass, half of it for the weights; or both parts, as ``1.2+0.8``."""
    transfer: str = "0"


def show_pipeline(
    output: Output,
    name: str,
    sizes: tuple[int, int, int | None],
    texts: TimeTexts,
    blocking: bool,
    out: Path | None,
) -> int:
    """Draw a schedule with its proof; status 3 if it is not proved.

    Args:
        output: Where to print.
        name: Of the schedule.
        sizes: Ranks, micro-batches, and stages a rank if given.
        texts: Times of stages and transfers.
        blocking: Whether a rank waits until what it sends has arrived.
        out: Where the picture goes.
    """
    pp, micro_batches, virtual_stages = sizes
    schedule = build_schedule(name, pp, micro_batches, virtual_stages)
    times, transfer = read_times(texts, schedule.stages)
    proof = prove_schedule(schedule)
    if not proof.proved:
        found = [Problem("schedule-not-proved", str(violation)) for violation in proof.violations]
        raise CheckFailedError(*found)
    walk = walk_schedule(schedule, times, transfer, overlap=not blocking)
    timeline = build_timeline(schedule, walk, _title(schedule), _note(proof, walk))
    _show(output, timeline, proof, walk)
    if out is not None:
        _write_picture(timeline, out)
        output.say(f"picture: {out}")
    predicted = _predict(schedule, times, transfer, blocking)
    output.result(_as_dict(schedule, proof, walk, predicted) | {"picture": None if out is None else str(out)})
    return 0


def read_times(texts: TimeTexts, stages: int) -> tuple[StageTimes, list[float]]:
    """Times from their texts: of forward, input and weight passes, and of transfers."""
    forward = [parts[0] for parts in _read_list("--forward", texts.forward, stages)]
    backward = _read_list("--backward", texts.backward, stages, most_parts=2)
    halves = [(parts[0] / 2, parts[0] / 2) if len(parts) == 1 else parts for parts in backward]
    inputs, weights = [h[0] for h in halves], [h[1] for h in halves]
    transfer = [parts[0] for parts in _read_list("--transfer", texts.transfer, max(1, stages - 1))]
    return StageTimes(_full(forward, stages), _full(inputs, stages), _full(weights, stages)), transfer


def _read_list(option: str, text: str, count: int, most_parts: int = 1) -> list[tuple[float, ...]]:
    """Times between commas, each of one part or of several with plus signs between."""
    try:
        found = [tuple(float(part) for part in each.split("+")) for each in text.split(",")]
    except ValueError:
        found = []
    good = all(
        len(parts) <= most_parts and all(math.isfinite(x) and x >= 0 for x in parts) for parts in found
    )
    if len(found) in (1, count) and good:
        return found
    many = f", or {count} with commas between" if count > 1 else ""
    parts = "; both parts of it as 1.2+0.8" if most_parts > 1 else ""
    problem = Problem("schedule-times", "is not a time: 0 or more", option, text, f"Give one{many}{parts}")
    raise UserError(problem)


def _full(values: list[float], count: int) -> list[float]:
    return values * count if len(values) == 1 else values


def _predict(
    schedule: PipelineSchedule, times: StageTimes, transfer: list[float], blocking: bool
) -> float | None:
    """What the planner's closed form says; none where stages or transfers are not all equal."""
    lists = (times.forward_s, times.backward_input_s, times.backward_weight_s, transfer)
    each = [np.unique(np.asarray(values)) for values in lists]
    if any(len(values) > 1 for values in each):
        return None
    f, b, w, t = (float(values[0]) for values in each)
    sizes = (schedule.pp, schedule.virtual_stages, schedule.micro_batches)
    return float(pipeline_time(schedule.name, *sizes, f, b, w, t, overlap=not blocking))


def _title(schedule: PipelineSchedule) -> str:
    each = f" x {schedule.virtual_stages}" if schedule.virtual_stages > 1 else ""
    return f"{schedule.name}, {schedule.pp}{each} stages, {schedule.micro_batches} micro-batches"


def _note(proof: Proof, walk: Walk) -> str:
    return (
        f"bubble {walk.bubble:.1%}, time {format_value(walk.makespan_s)}, "
        f"at most {max(proof.peak_in_flight)} activations in flight"
    )


def _show(output: Output, timeline: Timeline, proof: Proof, walk: Walk) -> None:
    output.say(timeline.title)
    if len(timeline.rows) <= MOST_TEXT_ROWS:
        rows, missing = draw_rows(timeline, output.width)
        for row in rows:
            output.draw(Text.assemble(*((text, _style(kind, chunk)) for text, kind, chunk in row)))
        if missing:
            output.say(f"({missing} more characters to the right; -o picture.svg has all)")
    output.say()
    output.say(f"time       {format_value(walk.makespan_s)}")
    output.say(
        f"bubble     {walk.bubble:.1%} of all ranks' time; {walk.bubble_overhead:.1%} on top of the work"
    )
    peaks = " ".join(map(str, proof.peak_in_flight))
    output.say(f"in flight  {peaks} (most activations of one stage and micro-batch, a rank each)")
    output.say(f"proved     {proof.actions} actions: each once, after what it needs; no rank waits for ever")


def _style(kind: Kind | None, chunk: int) -> str:
    if kind is None:
        return ""
    return COLOURS[kind] if chunk % 2 == 0 else f"bold {COLOURS[kind]}"


def _write_picture(timeline: Timeline, out: Path) -> None:
    bars = sum(len(row) for _, row in timeline.rows)
    if out.suffix.lower() != ".svg":
        rule, fix = "is not an .svg file, and no other kind is drawn", f"Use -o {out.with_suffix('.svg')}"
        raise UserError(Problem("schedule-picture", rule, path=str(out), fix=fix))
    if bars > MOST_BARS:
        rule = f"would have {bars:,} bars; {MOST_BARS:,} at most"
        raise UserError(
            Problem("schedule-picture", rule, path=str(out), fix="Use fewer stages or micro-batches")
        )
    try:
        out.write_text(draw_svg(timeline), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise UserError(
            Problem("schedule-picture", rule, path=str(out), fix="Name another file with -o")
        ) from None


def _as_dict(schedule: PipelineSchedule, proof: Proof, walk: Walk, predicted: float | None) -> dict[str, Any]:
    """The object of ``--json``; times are in the unit in which they were given."""
    actions = [
        [
            {"kind": a.kind.value, "stage": a.stage, "micro_batch": a.micro_batch, "start": start, "end": end}
            for a, start, end in zip(row, walk.start_s[rank], walk.end_s[rank], strict=True)
        ]
        for rank, row in enumerate(schedule.ranks)
    ]
    return {
        "schedule": schedule.name,
        "stages": schedule.pp,
        "virtual_stages": schedule.virtual_stages,
        "micro_batches": schedule.micro_batches,
        "actions": actions,
        "bubble": walk.bubble,
        "bubble_overhead": walk.bubble_overhead,
        "makespan": walk.makespan_s,
        "predicted_makespan": predicted,
        "idle": list(walk.idle_s),
        "peak_in_flight": list(proof.peak_in_flight),
        "peak_by_stage": list(proof.peak_by_stage),
        "proved": proof.proved,
    }
