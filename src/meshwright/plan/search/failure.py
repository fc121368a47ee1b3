"""Errors of a search without a result: the closest layout, and changes of the job that would fit."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes
from meshwright.layout.parameters import count_parameters
from meshwright.layout.text import describe_layout
from meshwright.plan.memory.fit import MemoryNeed, describe_usable, usable_bytes
from meshwright.plan.predict import Prediction, list_shortages, require_decoder
from meshwright.plan.search.alternatives import (
    SHORTEST_SEQUENCE,
    Alternative,
    describe_pins,
    find_alternatives,
    with_seq_len,
)
from meshwright.plan.search.find import SearchResult, find_layouts, with_cluster
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import with_eager_blocks

MOST_DOUBLINGS = 8
SUGGEST_S = 2.5
"""Seconds to search for changes of the job, in all."""
TRY_S = 1.0
"""Seconds for one change."""
LEAST_STATE_BYTES, LEAST_WEIGHT_BYTES = 14, 2
"""Bytes per parameter: weights, gradient and AdamW state in the leanest runtime; 16-bit weights only."""
NOT_BUILT = (
    "LoRA and 8-bit or bf16 optimizer state would need less memory; this version does not have them yet"
)
"""Common ways to save memory that are not available."""


def nothing_fits_error(
    closest: Prediction, suggestions: list[str], stopped_early: bool = False, given: bool = False
) -> UserError:
    """The error for a job without a layout that fits, or whose given layout does not fit."""
    job, need = closest.job, closest.need
    layout, short = describe_layout(closest.layout), "; ".join(list_shortages(job, closest.memory))
    if need.needed_bytes > usable_bytes(job.cluster):
        short += f" ({describe_usable(job.cluster)})"
    rule = f"does not fit: {short}, with {layout}"
    if not given:
        rule = f"does not fit with any layout. The closest is {layout}: {short}"
    if need.needed_bytes > usable_bytes(job.cluster):
        largest = max(closest.ledger.lines, key=lambda line: line.bytes)
        rule += f"; largest part: {largest.name}, {format_bytes(largest.bytes)}"
        if need.limited_by == "first step":
            steady = MemoryNeed.of(job, need.steady_step, need.steady_step)
            rule += f"; a steady step needs {format_bytes(steady.needed_bytes)}"
    if stopped_early:
        rule += "; the search reached its time limit, so a layout that fits may exist"
    others = [suggestion[0].lower() + suggestion[1:] for suggestion in suggestions[1:]]
    fix = "; or ".join([*suggestions[:1], *others]) or "Use a smaller model, or devices with more memory"
    if isinstance(job.model, DecoderModel):
        fix += f". {NOT_BUILT}"
    return UserError(Problem("plan-nothing-fits", rule, path=job.name, fix=fix))


def given_layout_error(prediction: Prediction) -> UserError:
    """The error for a given layout that does not fit, with the changes that do."""
    job = prediction.job
    return nothing_fits_error(
        prediction, [*_describe_alternatives(find_alternatives(job)), *_suggest_cluster(job)], given=True
    )


def search_error(job: Job, pins: dict[str, Any], found: SearchResult) -> UserError:
    """The error for a search without a result: no layout is legal with these keys, or none fits."""
    if found.closest is None:
        keys = describe_pins(pins)
        devices, runtime = job.cluster.world_size, job.train.runtime
        if found.stopped_early:
            rule = f"search on {devices} devices reached its time limit before it found a legal layout"
            fix = "Fix some keys of [layout], such as layout.tp and layout.pp"
            return UserError(Problem("plan-no-layout", rule, path=keys or "layout", fix=fix))
        leave, which = ("leaves", "it") if len(pins) == 1 else ("leave", "one of them")
        rule = f"{leave} no legal layout on {devices} device{'s' * (devices > 1)} with {runtime}"
        fix = f"Leave {which} out, or use more devices"
        return UserError(Problem("plan-no-layout", rule, path=keys or "layout", fix=fix))
    suggestions = [*suggest_changes(job, pins), *_suggest_cluster(job)]
    return nothing_fits_error(found.closest, suggestions, found.stopped_early)


def _describe_alternatives(changes: list[Alternative]) -> list[str]:
    return [f"Use {change.overrides} ({change.step_and_memory})" for change in changes]


def _suggest_cluster(job: Job) -> list[str]:
    """A hint to plan for a cluster preset, where the model does not fit this machine."""
    named = job.cluster.preset == "local" and isinstance(job.model, DecoderModel)
    return ["Plan it for a cluster, such as 8x8xh100-sxm"] if named else []


def suggest_changes(job: Job, pins: dict[str, Any]) -> list[str]:
    """Changes with which some layout fits: fewer fixed keys, eager blocks, more nodes, a shorter sequence."""
    found, until = [], time.process_time() + SUGGEST_S
    tried = (_freed_keys, _eager_blocks, _more_nodes, _shorter_sequences)
    for changes in (find(job, pins) for find in tried):
        for text, changed, kept in changes:
            left = until - time.process_time()
            if left <= 0:
                break
            more = changed.cluster.nodes > job.cluster.nodes  # fewer devices were searched before
            worlds = [changed.cluster.world_size] if more else None
            search = find_layouts(changed, kept, 1, worlds=worlds, budget_s=min(left, TRY_S))
            if search.best:
                best = search.best[0]
                figures = f"{describe_layout(best.layout)}: {format_bytes(best.needed_bytes)} per rank"
                found.append(f"{text} ({figures})")
                break
    return found


def _freed_keys(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    free = ("micro_batch", "recompute", "offload", "sequence_parallel", "schedule", "zero", "accumulate")
    names = [name for name in free if name in pins]
    for name in names:
        yield f"Leave layout.{name} to the planner", job, {k: v for k, v in pins.items() if k != name}
    if len(names) > 1:
        text = f"Leave {', '.join('layout.' + n for n in names)} to the planner"
        yield text, job, {k: v for k, v in pins.items() if k not in names}


def _eager_blocks(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    """They have no 16-bit weight copies that persist across steps."""
    if not uses_eager_blocks(job) and job.train.precision != "fp8":
        eager = dataclasses.replace(job, train=with_eager_blocks(job.train))
        yield "Use train.block_backend=eager", eager, pins


def _more_nodes(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    cluster = job.cluster
    if cluster.nic_bytes_per_s is None:
        return
    for power in range(1, MOST_DOUBLINGS + 1):
        nodes = cluster.nodes * 2**power
        if _may_hold(job, nodes * cluster.devices_per_node):
            text = f"Use cluster.nodes={nodes}, {nodes * cluster.devices_per_node} devices"
            yield text, with_cluster(job, nodes=nodes), pins


def _may_hold(job: Job, devices: int) -> bool:
    """Whether the devices and their CPUs could hold the model state; checked before a search."""
    room = job.cluster.memory_bytes + (job.cluster.host_memory_bytes or math.inf)
    each = LEAST_STATE_BYTES if job.train.optimizer == "adamw" else LEAST_WEIGHT_BYTES
    return each * count_parameters(require_decoder(job)) <= room * devices


def _shorter_sequences(job: Job, pins: dict[str, Any]) -> Iterator[tuple[str, Job, dict[str, Any]]]:
    length = job.data.seq_len // 2
    while length >= SHORTEST_SEQUENCE:
        yield f"Use data.seq_len={length}", with_seq_len(job, length), pins
        length //= 2
