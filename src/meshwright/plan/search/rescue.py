"""What would make a model fit that does not: each change tried by the planner, the smallest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.search.find import Found, find_layouts, with_cluster
from meshwright.plan.search.predict import Prediction, layout_words, predict_layouts
from meshwright.plan.search.settle import settle_micro_batch
from meshwright.plan.shapes import count_parameters
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality import find_problems, with_layout
from meshwright.spec.model import DecoderModel

MOST_DOUBLINGS = 8
SHORTEST_SEQUENCE = 128
MOST_REMEDIES = 4
LEAST_STATE_BYTES, LEAST_WEIGHT_BYTES = 14, 2
"""Of a parameter: weights, gradient and AdamW's state in the leanest runtime; 16-bit weights alone."""


def nothing_fits(job: Job, closest: Prediction, remedies: list[str]) -> UserError:
    """The error for a model that no layout fits."""
    cluster, words = job.cluster, layout_words(closest.layout)
    over = closest.peak_bytes - cluster.memory_bytes
    if over > 0 or not cluster.host_memory_bytes:
        name, count = max(closest.lines.items(), key=lambda line: line[1])
        rule = f"does not fit: {words} needs {format_bytes(closest.peak_bytes)} a device, "
        rule += f"{format_bytes(over)} more than its {format_bytes(cluster.memory_bytes)}; the largest line "
        rule += f"is {name} with {format_bytes(count)}"
    else:
        more = closest.host_bytes - cluster.host_memory_bytes
        rule = f"does not fit: {words} needs {format_bytes(closest.host_bytes)} of host memory a device, "
        rule += f"{format_bytes(more)} more than cluster.host_memory_bytes="
        rule += f"{format_bytes(cluster.host_memory_bytes)}"
    others = [remedy[0].lower() + remedy[1:] for remedy in remedies[1:]]
    fix = "; or ".join([*remedies[:1], *others]) or "Use a smaller model, or devices with more memory"
    return UserError(Problem("plan-nothing-fits", rule, path=job.name, fix=fix))


def explain_failure(job: Job, pins: dict[str, Any], found: Found) -> UserError:
    """The error for a search that found nothing: no layout is legal with these keys, or none fits."""
    if found.least is None:
        keys = " ".join(f"layout.{name}={str(value).lower()}" for name, value in pins.items())
        devices, runtime = job.cluster.world_size, job.train.runtime
        leave, which = ("leaves", "it") if len(pins) == 1 else ("leave", "one of them")
        rule = f"{leave} no legal layout on {devices} device{'s' * (devices > 1)} with {runtime}"
        fix = f"Leave {which} to the planner, or use more devices"
        return UserError(Problem("plan-no-layout", rule, path=keys, fix=fix))
    (closest,) = predict_layouts(job, [found.least.layout(0)])
    return nothing_fits(job, closest, remedies_for_search(job, pins))


def remedies_for_search(job: Job, pins: dict[str, Any]) -> list[str]:
    """Changes after which some layout fits: keys let go, more nodes, a shorter sequence."""
    found = []
    for changes in (_freed_keys(job, pins), _more_nodes(job, pins), _shorter_sequences(job, pins)):
        for words, changed, kept in changes:
            more = changed.cluster.nodes > job.cluster.nodes  # fewer devices were tried before
            search = find_layouts(changed, kept, 1, worlds=[changed.cluster.world_size] if more else None)
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
    free = ("micro_batch", "recompute", "offload", "sequence_parallel", "schedule", "zero", "accumulate")
    names = [name for name in free if name in pins]
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
        if not _may_hold(job, nodes * cluster.devices_per_node):
            continue
        words = f"Use cluster.nodes={nodes}, {nodes * cluster.devices_per_node} devices"
        yield words, with_cluster(job, nodes=nodes), pins


def _may_hold(job: Job, devices: int) -> bool:
    """Whether so many devices and their hosts could hold the state alone, before anything is searched."""
    assert isinstance(job.model, DecoderModel), "layouts are searched for decoders"
    room = job.cluster.memory_bytes + (job.cluster.host_memory_bytes or math.inf)
    each = LEAST_STATE_BYTES if job.train.optimizer == "adamw" else LEAST_WEIGHT_BYTES
    return each * count_parameters(job.model) <= room * devices


def _shorter_sequences(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        yield f"Use data.seq_len={length}", with_seq_len(job, length), pins
        length //= 2


def with_seq_len(job: Job, seq_len: int) -> Job:
    """The job with shorter samples."""
    return dataclasses.replace(job, data=dataclasses.replace(job.data, seq_len=seq_len))


def single_changes(layout: Layout) -> list[tuple[str, dict[str, Any]]]:
    """Changes of a layout that may need less memory, one thing at a time, in words and as keys."""
    doubled = f"{layout.world_size * 2} devices"
    return [
        ("micro_batch=1", {"micro_batch": 1}),
        ("recompute=selective", {"recompute": "selective"}),
        ("recompute=full", {"recompute": "full"}),
        ("sequence_parallel=true", {"sequence_parallel": True}),
        *((f"zero={stage}", {"zero": stage}) for stage in range(layout.zero + 1, 4)),
        *(
            (
                f"dp_shard={layout.data_degree} layout.dp_replicate=1 layout.zero={stage}",
                {"dp_shard": layout.data_degree, "dp_replicate": 1, "zero": stage},
            )
            for stage in ((1, 2, 3) if layout.dp_replicate > 1 else ())
        ),
        (f"ep={layout.ep * 2}", {"ep": layout.ep * 2}),
        ("offload=optimizer", {"offload": "optimizer"}),
        ("offload=all", {"offload": "all"}),
        (
            f"dp_shard={layout.dp_shard * 2}, {doubled}",
            {"dp_shard": layout.dp_shard * 2, "zero": layout.zero or 3},
        ),
        (f"pp={layout.pp * 2}, {doubled}", {"pp": layout.pp * 2}),
        (f"tp={layout.tp * 2}, {doubled}", {"tp": layout.tp * 2}),
        (f"cp={layout.cp * 2}, {doubled}", {"cp": layout.cp * 2}),
    ]


def remedies_for_layout(job: Job, layout: Layout) -> list[str]:
    """Changes of a given layout, or of its sequence, with which it fits; the smallest first.

    Single ones, and where none of them does, micro-batch and recomputation together.
    """
    found = _those_that_fit(_changed(job, layout, single_changes(layout)))
    if not found:
        both = [
            (f"micro_batch=1 layout.recompute={mode}", {"micro_batch": 1, "recompute": mode})
            for mode in ("selective", "full")
        ]
        found = _those_that_fit(_changed(job, layout, both))
    lengths = [n for power in range(1, 20) if (n := job.data.seq_len >> power) >= SHORTEST_SEQUENCE]
    shorter = [(f"Use data.seq_len={n}", with_seq_len(job, n), layout) for n in lengths]
    return [*found, *_those_that_fit(shorter)][:MOST_REMEDIES]


def _changed(
    job: Job, layout: Layout, tries: list[tuple[str, dict[str, Any]]]
) -> list[tuple[str, Job, Layout]]:
    return [
        (f"Use layout.{words}", job, dataclasses.replace(layout, **keys))
        for words, keys in tries
        if any(getattr(layout, key) != value for key, value in keys.items())
    ]


def _those_that_fit(changes: list[tuple[str, Job, Layout]], most: int = MOST_REMEDIES) -> list[str]:
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
