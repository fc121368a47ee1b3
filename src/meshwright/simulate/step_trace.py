"""Writes a simulated step as a trace in the Chrome JSON format, which Perfetto and chrome://tracing open.

One process per pp rank, with a thread for the passes, one for compute and exposed communication, and one per
axis for overlapped communication. Arrows connect a pass with the pass that receives its result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.schedule.pipeline.actions import consumer_of
from meshwright.simulate.step import IDLE, WORK, Lane, StepEvent, StepTimeline

MAX_ACTIONS = 200_000
"""Passes in a trace: about 200 MB of JSON, the most that a browser opens."""
INSIDE = 1e-3
"""An arrow begins this share of its pass before the end."""
PASSES, PIECES, FIRST_OVERLAPPED = 0, 1, 2
"""Thread numbers of a process."""


def write_trace(timeline: StepTimeline, path: Path, pp_ranks: Sequence[int] | None = None) -> None:
    """Write the trace of some pp ranks, or of all.

    Raises:
        UserError: It would be too large, or the file cannot be written.
    """
    chosen = list(timeline.pp_ranks if pp_ranks is None else pp_ranks)
    actions = timeline.actions * len(chosen) // len(timeline.pp_ranks)
    if actions > MAX_ACTIONS:
        rule = f"would have {actions:,} passes; at most {MAX_ACTIONS:,} are written"
        raise UserError(
            Problem("trace-too-large", rule, path=str(path), fix="Choose ranks, such as --pp-ranks 0")
        )
    events = [event for pp_rank in chosen for event in _lane_events(timeline, timeline.lane(pp_rank))]
    events += _arrows(timeline, set(chosen))
    facts = {
        "step_s": timeline.step_s,
        "job": timeline.plan.job.name,
        "simulated": True,
        "micro_batches": timeline.plan.micro_batches,
    }
    lines = ",\n".join(json.dumps(event) for event in events)
    text = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n{lines}\n]}}\n'
    try:
        replace_text(path, text)
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Choose another file"
        raise UserError(Problem("trace-not-written", rule, path=str(path), fix=fix)) from None


def _lane_events(timeline: StepTimeline, lane: Lane) -> Iterator[dict[str, Any]]:
    pid = lane.pp_rank
    yield _name("process_name", pid, 0, timeline.name_of(pid))
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    yield _name("thread_name", pid, PASSES, "passes")
    yield _name("thread_name", pid, PIECES, "compute and exposed communication")
    for event in lane.actions:
        yield _slice(event, pid, PASSES)
    for event in lane.events:
        yield _slice(event, pid, PIECES)
    for number, (axis, events) in enumerate(lane.overlapped.items()):
        yield _name("thread_name", pid, FIRST_OVERLAPPED + number, f"overlapped, {axis}")
        for event in events:
            yield _slice(event, pid, FIRST_OVERLAPPED + number)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(event: StepEvent, pid: int, tid: int) -> dict[str, Any]:
    """A complete event; times are in microseconds."""
    args = {"stage": event.stage, "micro_batch": event.micro_batch}
    return {
        "name": event.name if event.micro_batch is None else f"{event.name} {event.micro_batch}",
        "cat": "idle" if event.part in IDLE else "compute" if event.part == WORK[0] else event.part,
        "ph": "X",
        "ts": event.start_s * 1e6,
        "dur": event.duration_s * 1e6,
        "pid": pid,
        "tid": tid,
        "args": {key: value for key, value in args.items() if value is not None},
    }


def _arrows(timeline: StepTimeline, chosen: set[int]) -> Iterator[dict[str, Any]]:
    """Transfers between the chosen ranks, from the end of a pass to the start of the receiving one."""
    schedule, walk = timeline.schedule, timeline.walk
    if schedule is None or walk is None or len(chosen) < 2:
        return
    number = 0
    for rank in sorted(chosen):
        times = zip(schedule.ranks[rank], walk.start_s[rank], walk.end_s[rank], strict=True)
        for action, start_s, end_s in times:
            wanted = consumer_of(action, schedule.stages)
            if wanted is None:
                continue
            receiver, position = schedule.positions[wanted]
            if receiver == rank or receiver not in chosen:
                continue
            number += 1
            arrow = {"name": "transfer", "cat": "pipeline transfers", "id": number, "tid": PASSES}
            inside_s = end_s - INSIDE * (end_s - start_s)  # an arrow begins in the slice that encloses it
            yield {**arrow, "ph": "s", "pid": rank, "ts": inside_s * 1e6}
            yield {**arrow, "ph": "f", "bp": "e", "pid": receiver,
                   "ts": walk.start_s[receiver][position] * 1e6}  # fmt: skip
