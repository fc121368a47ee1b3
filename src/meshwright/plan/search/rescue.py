"""What would make a model fit that does not: each change tried by the planner, the smallest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.search.find import Found, find_layouts, with_cluster
from meshwright.plan.search.predict import Prediction, layout_words, predict_layouts
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout

MOST_DOUBLINGS = 8
SHORTEST_SEQUENCE = 128


def nothing_fits(job: Job, closest: Prediction, remedies: list[str]) -> UserError:
    """The error for a model that no layout fits."""
    room = job.cluster.memory_bytes
    name, count = max(closest.lines.items(), key=lambda line: line[1])
    rule = f"does not fit: {layout_words(closest.layout)} needs {format_bytes(closest.peak_bytes)} a device, "
    rule += f"{format_bytes(closest.peak_bytes - room)} more than its {format_bytes(room)}; the largest line "
    rule += f"is {name} with {format_bytes(count)}"
    fix = "; or ".join(remedies) or "Use a smaller model, or devices with more memory"
    return UserError(Problem("plan-nothing-fits", rule, path=job.name, fix=fix))


def remedies_for_search(job: Job, pins: dict[str, Any]) -> list[str]:
    """Changes after which some layout fits: keys let go, more nodes, a shorter sequence."""
    tries: list[tuple[str, Iterator[tuple[str, Job, dict[str, Any]]]]] = [
        ("free", _freed_keys(job, pins)),
        ("nodes", _more_nodes(job, pins)),
        ("sequence", _shorter_sequences(job, pins)),
    ]
    found = []
    for _, changes in tries:
        for words, changed, kept in changes:
            search = find_layouts(changed, kept, 1)
            if search.best is not None:
                found.append(f"{words} ({_figures(search)})")
                break
    return found


def _figures(search: Found) -> str:
    assert search.best is not None, "figures of a search that found something"
    layout = search.best.grid.layout(0)
    peak, step = float(search.best.peak_bytes[0]), float(search.best.step_s[0])
    return f"{layout_words(layout)}: {format_bytes(peak)} a device, {format_seconds(step)} a step"


def _freed_keys(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    names = [n for n in ("micro_batch", "recompute", "offload", "sequence_parallel", "schedule") if n in pins]
    for name in names:
        yield f"Leave layout.{name} to the planner", job, {k: v for k, v in pins.items() if k != name}
    if len(names) > 1:
        words = f"Leave {', '.join('layout.' + n for n in names)} to the planner"
        yield words, job, {k: v for k, v in pins.items() if k not in names}


def _more_nodes(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    cluster = job.cluster
    for power in range(1, MOST_DOUBLINGS + 1):
        nodes = cluster.nodes * 2**power
        if cluster.nic_bytes_per_s is None:
            return
        words = f"Use cluster.nodes={nodes}, {nodes * cluster.devices_per_node} devices"
        yield words, with_cluster(job, nodes=nodes), pins


def _shorter_sequences(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        yield f"Use data.seq_len={length}", with_seq_len(job, length), pins
        length //= 2


def with_seq_len(job: Job, seq_len: int) -> Job:
    """The job with shorter samples."""
    return dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=seq_len))


def remedies_for_layout(job: Job, layout: Layout) -> list[str]:
    """Single changes of a given layout, or of its sequence, with which it fits."""
    changes: list[tuple[str, Job, Layout]] = []

    def change(words: str, **keys: Any) -> None:
        changes.append((words, job, dataclasses.replace(layout, **keys)))

    if (layout.micro_batch or 1) > 1:
        change("Use layout.micro_batch=1", micro_batch=1)
    for mode in ("selective", "full"):
        if layout.recompute != mode and layout.recompute != "full":
            change(f"Use layout.recompute={mode}", recompute=mode)
    if layout.tp > 1 and not layout.sequence_parallel:
        change("Use layout.sequence_parallel=true", sequence_parallel=True)
    for stage in range(layout.zero + 1, 4):
        if layout.dp_shard > 1:
            change(f"Use layout.zero={stage}", zero=stage)
    for away in ("optimizer", "all"):
        if layout.offload == "none":
            change(f"Use layout.offload={away}", offload=away)
    for axis in ("dp_shard", "pp", "tp"):
        keys: dict[str, Any] = {axis: getattr(layout, axis) * 2}
        if axis == "dp_shard" and layout.zero == 0:
            keys["zero"] = 3
        change(f"Use layout.{axis}={keys[axis]}, {layout.world_size * 2} devices", **keys)
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        changes.append((f"Use data.seq_len={length}", with_seq_len(job, length), layout))
        length //= 2
    return _those_that_fit(changes)


def _those_that_fit(changes: list[tuple[str, Job, Layout]], most: int = 4) -> list[str]:
    found: list[str] = []
    for words, job, layout in changes:
        if find_problems(with_layout(job, layout), to_run=False):
            continue
        settled = settle_micro_batch(job, layout)
        (other,) = predict_layouts(job, [settled], walk=False)
        kind = words.partition("=")[0]
        if other.fits and not any(f.startswith(kind + "=") for f in found):
            figures = f"{format_bytes(other.peak_bytes)} a device, {format_seconds(other.step_s)} a step"
            found.append(f"{words} ({figures})")
        if len(found) == most:
            break
    return found
