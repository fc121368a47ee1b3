"""``meshwright schedule collective`` and ``simulate collective``: collective algorithms, step by step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import build_collective, compare_collectives, draw_comparison, prove_collective
from meshwright.cli.options import read_size
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_plural, format_seconds
from meshwright.report.figure import require_picture

if TYPE_CHECKING:
    from meshwright.collectives import ProvedCollective
    from meshwright.results import CollectiveComparison

MOST_MESSAGES, MOST_STEPS = 8, 64
"""Printed per step, and steps that are printed."""


@dataclass(frozen=True)
class CollectiveRequest:
    """A collective as given on the command line."""

    op: str
    algorithm: str
    ranks: int
    root: int = 0
    ranks_per_node: int | None = None
    order: str | None = None
    segments: int = 1
    size: str = "1MB"
    on: str | None = None


def show_collective(output: Output, request: CollectiveRequest, out: Path | None) -> int:
    """Print a schedule step by step with its proof and counts; status 3 if the proof fails."""
    if out is not None:
        require_picture(out)
    schedule = build_collective(
        request.op,
        request.algorithm,
        request.ranks,
        root=request.root,
        ranks_per_node=request.ranks_per_node,
        order=None if request.order is None else read_numbers("--order", request.order),
        segments=request.segments,
    )
    found = prove_collective(schedule, read_size("--size", request.size), request.on)
    _show(output, found, request.on)
    if out is not None:
        found.draw(out)
        output.print(f"picture: {out}")
    output.result(found.as_dict() | {"picture": None if out is None else str(out)})
    return 0


def show_comparison(
    output: Output, op: str, on: str, ranks: str | None, sizes: str | None, out: Path | None
) -> int:
    """Print which algorithm is fastest at which size and number of ranks."""
    if out is not None:
        require_picture(out)
    counts = [] if ranks is None else read_numbers("--ranks", ranks)
    given = [] if sizes is None else [read_size("--sizes", text) for text in sizes.split(",")]
    found = compare_collectives(op, on, ranks=counts, sizes=given)
    _show_fastest(output, found)
    if out is not None:
        draw_comparison(found, out)
        output.print(f"picture: {out}")
    output.result(found.as_dict() | {"picture": None if out is None else str(out)})
    return 0


def read_numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        fix = "For example 0,2,1,3"
        raise UserError(Problem("collective-numbers", "is not a list of numbers", option, text, fix))
    return [int(part) for part in text.split(",")]


def _show(output: Output, found: ProvedCollective, on: str | None) -> None:
    schedule, traffic = found.schedule, found.traffic
    ranks = format_plural(schedule.ranks, "rank")
    root = "" if schedule.root is None else f", root {schedule.root}"
    chunks = format_plural(schedule.chunks, "chunk")
    output.print(f"{schedule.op} by {schedule.algorithm}, {ranks}{root}, {chunks}")
    steps = found.transfers
    for at, transfers in enumerate(steps[:MOST_STEPS]):
        texts = [
            f"{t.source}→{t.target}:{_range(t.start, t.stop)}{'+' if t.combine == 'reduce' else ''}"
            for t in transfers[:MOST_MESSAGES]
        ]
        more = f"  and {len(transfers) - MOST_MESSAGES} more" if len(transfers) > MOST_MESSAGES else ""
        output.print(f"step {at:>3}  {'  '.join(texts)}{more}")
    if len(steps) > MOST_STEPS:
        output.print(f"({len(steps) - MOST_STEPS} more steps; --json has all)")
    if steps:
        output.print("(source→target:chunk; + adds, others copy)")
    output.print()
    output.print(f"steps      {found.proof.steps} (messages that must follow each other)")
    for name, counts in (("sent", traffic.sent), ("received", traffic.received)):
        least, most = min(counts), max(counts)
        size = found.size_bytes
        share = f", {most / size:.3g} x the tensor of {format_bytes(size)}" if size else ""
        each = " to ".join(dict.fromkeys((format_bytes(least), format_bytes(most))))
        output.print(f"{name:<10} {each} per rank{share}")
    if found.times is not None:
        output.print(f"time       {format_seconds(found.times.time_s)} on {on} (simulated)")
    output.print(
        f"proved     {format_plural(found.proof.messages, 'message')}: the result is right on every rank, "
        "nothing counts twice; no deadlock"
    )


def _range(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"


def _show_fastest(output: Output, found: CollectiveComparison) -> None:
    rows = [
        (format_bytes(size), *(found.fastest(count, size).algorithm for count in found.ranks))
        for size in found.sizes
    ]
    columns = ("size", *(format_plural(count, "rank") for count in found.ranks))
    output.table(f"Fastest algorithm of {found.op} on {found.cluster} (simulated)", columns, rows)
    most = max(found.ranks)
    names = list(dict.fromkeys(row.algorithm for row in found.rows if row.ranks == most))
    times = {(row.size_bytes, row.algorithm): row.time_s for row in found.rows if row.ranks == most}
    output.print("")
    output.table(
        f"Time on {format_plural(most, 'rank')}",
        ("size", *names),
        [
            (format_bytes(size), *(format_seconds(times[size, name]) for name in names))
            for size in found.sizes
        ],
    )
