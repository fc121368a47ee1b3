"""``meshwright schedule pipeline``: generates or loads a schedule, proves, simulates, draws and saves it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.report.plot import format_value
from meshwright.report.timeline_text import draw_rows
from meshwright.timelines import SimulatedSchedule, build_schedule, load_schedule, simulate_schedule

if TYPE_CHECKING:
    from meshwright.results import PipelineSchedule

COLOURS = {"F": "white on blue", "B": "white on green", "W": "black on yellow"}
"""By kind of action: forward, backward, weight gradient."""
MOST_TEXT_ROWS = 64
"""With more ranks than this there is no text timeline."""


@dataclass(frozen=True)
class TimeOptions:
    """Times as given on the command line: one number, or one per stage separated by commas."""

    forward: str = "1"
    backward: str = "2"
    """The whole backward pass, half of it weight gradient; or both parts, as ``1.2+0.8``."""
    transfer: str = "0"


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule by name and sizes, with defaults, or from a file."""

    name: str | None = None
    pp: int | None = None
    micro_batches: int | None = None
    virtual_stages: int | None = None
    file: Path | None = None

    def schedule(self) -> PipelineSchedule:
        """Build or load the schedule."""
        if self.file is None:
            return build_schedule(
                self.name or "1f1b",
                4 if self.pp is None else self.pp,
                8 if self.micro_batches is None else self.micro_batches,
                self.virtual_stages,
            )
        given = {
            "--schedule": self.name,
            "--stages": self.pp,
            "--micro-batches": self.micro_batches,
            "--virtual-stages": self.virtual_stages,
        }
        ignored = [option for option, value in given.items() if value is not None]
        if ignored:
            rule = f"has its own schedule and sizes; {', '.join(ignored)} would have no effect"
            fix = f"Leave {'it' if len(ignored) == 1 else 'them'} out"
            raise UserError(Problem("schedule-file-and-sizes", rule, "--file", str(self.file), fix))
        return load_schedule(self.file)


def show_pipeline(
    output: Output,
    request: ScheduleRequest,
    options: TimeOptions,
    blocking: bool,
    out: Path | None,
    save: Path | None,
) -> int:
    """Print a schedule with its proof; status 3 if the proof fails.

    Args:
        output: Where to print.
        request: Which schedule.
        options: Times of stages and transfers.
        blocking: Whether sends block until the data have arrived.
        out: Where to plot the timeline.
        save: Where to write the schedule as CSV.
    """
    schedule = request.schedule()
    found = simulate_schedule(schedule, **read_times(options, schedule.stages), overlap=not blocking)
    _show(output, found)
    if out is not None:
        found.draw(out)
        output.print(f"picture: {out}")
    if save is not None:
        found.write(save)
        output.print(f"schedule: {save}")
    # The name of a file may be that of a generated schedule, which has a closed form.
    predicted = None if request.file else found.predicted_s
    files = {"picture": out, "saved": save}
    output.result(
        found.as_dict()
        | {"predicted_makespan": predicted}
        | {name: None if path is None else str(path) for name, path in files.items()}
    )
    return 0


def read_times(options: TimeOptions, stages: int) -> dict[str, list[float]]:
    """Parse the times: forward, input gradient, weight gradient, and transfers."""
    forward = [parts[0] for parts in _read_list("--forward", options.forward, stages)]
    backward = _read_list("--backward", options.backward, stages, most_parts=2)
    halves = [(parts[0] / 2, parts[0] / 2) if len(parts) == 1 else parts for parts in backward]
    inputs, weights = [h[0] for h in halves], [h[1] for h in halves]
    transfer = [parts[0] for parts in _read_list("--transfer", options.transfer, max(1, stages - 1))]
    return {
        "forward_s": forward,
        "backward_input_s": inputs,
        "backward_weight_s": weights,
        "transfer_s": transfer,
    }


def _read_list(option: str, text: str, count: int, most_parts: int = 1) -> list[tuple[float, ...]]:
    """Parse times separated by commas, each of one or more parts separated by plus signs."""
    try:
        found = [tuple(float(part) for part in each.split("+")) for each in text.split(",")]
    except ValueError:
        found = []
    good = all(
        len(parts) <= most_parts and all(math.isfinite(x) and x >= 0 for x in parts) for parts in found
    )
    if len(found) in (1, count) and good:
        return found
    many = f", or {count} separated by commas" if count > 1 else ""
    parts = "; both parts of it as 1.2+0.8" if most_parts > 1 else ""
    problem = Problem("schedule-times", "is not a time: 0 or more", option, text, f"Give one{many}{parts}")
    raise UserError(problem)


def _show(output: Output, found: SimulatedSchedule) -> None:
    timeline, proof, walk = found.timeline, found.proof, found.walk
    output.print(timeline.title)
    if len(timeline.rows) <= MOST_TEXT_ROWS:
        rows, missing = draw_rows(timeline, output.width)
        for row in rows:
            output.draw(Text.assemble(*((text, _style(kind, chunk)) for text, kind, chunk in row)))
        if missing:
            output.print(f"({missing} more characters to the right; -o picture.svg has all)")
    output.print()
    output.print(f"time       {format_value(walk.makespan_s)}")
    output.print(
        f"bubble     {walk.bubble:.1%} of all ranks' time; {walk.bubble_overhead:.1%} of the work as overhead"
    )
    idle = " ".join(f"{seconds / (walk.makespan_s or 1.0):.1%}" for seconds in walk.idle_s)
    output.print(f"idle       {idle} (share of the time, per rank)")
    peaks = " ".join(map(str, proof.peak_in_flight))
    output.print(f"in flight  {peaks} (peak number of in-flight activations, per rank)")
    output.print(f"proved     {proof.actions} actions: each runs once, after its dependencies; no deadlock")


def _style(kind: str | None, chunk: int) -> str:
    if kind is None:
        return ""
    return COLOURS[kind] if chunk % 2 == 0 else f"bold {COLOURS[kind]}"
