"""A plan as text: the answer, its reasons, and with ``-v`` memory, step time, collectives and ranking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.cli.output import Output
from meshwright.core.units import (
    format_bytes,
    format_cost,
    format_count,
    format_plural,
    format_seconds,
    format_throughput,
)
from meshwright.layout.text import describe_layout, layout_overrides
from meshwright.report.plan_facts import (
    describe_accuracy,
    describe_basis,
    find_step_range,
    find_tiers,
    memory_rows,
)
from meshwright.report.stage_table import STAGE_COLUMNS, stage_cells
from meshwright.spec.model import DecoderModel

if TYPE_CHECKING:
    from meshwright.results import PlanContract, Prediction, SearchResult

MOST_REASONS = 12
"""Lines of reasons without ``-v``."""
MOST_ROWS = 12
"""Layouts in the table; ``--json`` has ``--top`` of them."""
MOST_COLLECTIVES = 40
"""With more rows of collectives than this, only those of one pp rank are shown."""
MOST_STAGES = 16
"""With more stages than this there is no table of stages; the reasons list their layers."""
MOST_NODES = 16
"""Nodes in the table of placed ranks."""
FORMULA_WIDTH = 90


def describe_answer(output: Output, plan: PlanContract, verbose: bool) -> None:
    """Print whether the job fits, its layout, step time, memory and cost, then the reasons."""
    job = plan.job
    cluster = f"{job.cluster.device_name}, {job.cluster.preset or job.cluster.file or 'given'}"
    ranks, devices = plan.world_size, job.cluster.world_size
    share = (
        f"on {ranks} of {devices} devices" if ranks <= devices else f"in {ranks} ranks on {devices} devices"
    )
    needed = max(rank.needed_bytes for rank in plan.classes().values())
    verdict = "fits" if needed <= plan.usable_bytes else "does not fit"
    output.print(f"{job.name} {verdict}: {format_count(plan.parameters)} parameters {share} ({cluster})")
    output.print(f"  layout  {describe_layout(job.layout)}")
    spread = find_step_range(plan)
    low, high = format_seconds(spread.low_s), format_seconds(spread.high_s)
    rate = format_throughput(plan.tokens_per_step / plan.step_s, job.unit)
    step = f"{format_seconds(plan.step_s)} ({low} to {high}), {rate}, MFU {plan.mfu:.1%}"
    output.print(f"  step    {step}")
    memory = f"{format_bytes(needed)} of {format_bytes(plan.usable_bytes)} per device"
    output.print(f"  memory  {memory}{describe_accuracy(plan)}")
    output.print(f"  cost    {_describe_cost(plan)}")
    output.print()
    shown = list(plan.reasons) if verbose else shorten_reasons(plan.reasons)
    for reason in shown:
        output.print(f"  {reason.removeprefix(f'{describe_layout(job.layout)}: ')}")
    if not verbose:
        left = len(plan.reasons) - len(shown)
        more = f"{format_plural(left, 'more reason')}, " if left else ""
        output.print(f"  -v: {more}memory by line, step time by part, collectives, other layouts")


def _describe_cost(plan: PlanContract) -> str:
    """Price of the cluster, and of a billion tokens."""
    price = plan.job.cluster.cost_per_hour
    if price is None or plan.cost_per_step is None:
        return "unknown: set cluster.cost_per_hour"
    hourly, per_billion = price * plan.world_size, plan.cost_per_step / plan.tokens_per_step * 1e9
    return f"{format_cost(hourly)}/h, {format_cost(per_billion)} per billion {plan.job.unit}"


def shorten_reasons(reasons: Sequence[str]) -> list[str]:
    """The first reasons, in their order; rejected layouts are left out before anything else."""
    rejected = [reason for reason in reasons if reason.startswith("rejected ")]
    room = max(0, MOST_REASONS - (len(reasons) - len(rejected)))
    left_out = set(rejected[room:])
    return [reason for reason in reasons if reason not in left_out][:MOST_REASONS]


def describe_plan(output: Output, plan: PlanContract, verbose: bool) -> None:
    """Print the answer; with ``verbose`` also its basis, stages, memory, step time and collectives."""
    describe_answer(output, plan, verbose)
    if not verbose:
        return
    job = plan.job
    output.print()
    if isinstance(job.model, DecoderModel):
        train, length = job.train, job.data.seq_len
        tokens = format_count(train.global_batch * length)
        samples = f"{train.global_batch:,} samples of {length:,} tokens, {tokens} tokens in all"
        output.print(f"per step: {samples}, in {train.precision}; runtime {train.runtime}")
    output.print(describe_basis(plan))
    output.print(f"overrides: {layout_overrides(job.layout)}")
    if plan.pipeline is not None and plan.exact and len(plan.stages()) <= MOST_STAGES:
        output.print()
        output.table("Stages", STAGE_COLUMNS, stage_cells(plan))
    _describe_memory(output, plan)
    _describe_host_memory(output, plan)
    _describe_step(output, plan)
    _describe_collectives(output, plan)
    _describe_placement(output, plan)


def _describe_memory(output: Output, plan: PlanContract) -> None:
    """Print the memory of the rank with the highest need, and the need of the other ranks."""
    classes = plan.classes()
    name, rank = max(classes.items(), key=lambda item: item[1].needed_bytes)
    rows = [(line.name, format_bytes(line.bytes), shorten_formula(line.formula)) for line in rank.lines]
    rows += memory_rows(plan, rank)
    output.print()
    exact = "" if plan.exact else " (estimated)"
    output.table(f"Memory of {name}{exact}", ("", "bytes", "formula"), rows)
    others = [
        f"{other} {format_bytes(found.needed_bytes)}" for other, found in classes.items() if other != name
    ]
    if others:
        output.print(f"needed by the other ranks: {', '.join(others)}")


def _describe_host_memory(output: Output, plan: PlanContract) -> None:
    """Print the CPU memory of a node, if something is kept there."""
    memory = plan.host_memory
    if memory is None or not (memory.snapshot_bytes or memory.staging_bytes or memory.offloaded_bytes):
        return
    per_rank = f"2 slots; at most {format_bytes(memory.rank_snapshot_bytes)} per rank"
    per_rank += "; off: they do not fit" if memory.snapshots_off else ""
    rows = [
        ("in-memory snapshots", memory.snapshot_bytes, per_rank),
        (
            "snapshots of another layout",
            memory.changing_bytes,
            f"while the layout changes (elastic.may_change={plan.job.elastic.may_change})",
        ),
        (
            "staging of checkpoints",
            memory.staging_bytes,
            "off: it does not fit" if memory.staging_off else "a copy of the state",
        ),
        ("offloaded state", memory.offloaded_bytes, f"layout.offload={plan.job.layout.offload}"),
        ("training", memory.training_bytes, "the ranks themselves: the device is the CPU"),
    ]
    shown = [(name, format_bytes(size), formula) for name, size, formula in rows if size]
    room = format_bytes(memory.room_bytes) if memory.room_bytes else "unknown"
    cluster = plan.job.cluster
    on_cpu = cluster.device == "cpu" and cluster.host_memory_bytes is None
    key = "memory_bytes" if on_cpu else "host_memory_bytes"
    shown.append(("room", room, f"cluster.{key} x {cluster.devices_per_node} devices"))
    output.print()
    output.table(f"CPU memory of a node with {format_plural(memory.ranks, 'rank')}", ("", "bytes", ""), shown)


def shorten_formula(formula: str) -> str:
    """A formula for a table: short fractions and its first terms; ``--json`` has the whole formula."""
    short = re.sub(r"(\d+\.\d{3})\d+", r"\1", formula)
    return short if len(short) <= FORMULA_WIDTH else f"{short[: FORMULA_WIDTH - 4].rstrip()} ..."


def _describe_step(output: Output, plan: PlanContract) -> None:
    rows = [
        (name, format_seconds(value), f"{value / plan.step_s:.1%}")
        for name, value in sorted(plan.breakdown_s.items(), key=lambda part: -part[1])
    ]
    rows += [(f"{name}, hidden", format_seconds(value), "") for name, value in plan.hidden_s.items() if value]
    output.print()
    output.table("Step time", ("", "time", "share"), rows)


def _describe_collectives(output: Output, plan: PlanContract) -> None:
    """Print the collectives, with a column of pp ranks under pipeline parallelism."""
    if not plan.collectives:
        if plan.world_size > 1:
            output.print("\ncollectives are predicted for the meshwright runtime only")
        return
    shown, columns = list(plan.collectives), ["axis", "op", "phase", "ranks", "calls", "bytes", "within"]
    title = "Collectives per rank and phase"
    if len(shown) > MOST_COLLECTIVES:
        moved = {
            rank: sum(r.bytes for r in shown if r.pp_rank == rank) for rank in {r.pp_rank for r in shown}
        }
        busiest = max((rank for rank in moved if rank is not None), key=lambda rank: moved[rank])
        shown = [row for row in shown if row.pp_rank in (None, busiest)]
        title += f", pp rank {busiest} (the busiest)"
    tiers = find_tiers(plan)
    cells = [
        [t.axis, t.op, t.phase, str(t.ranks), f"{t.calls:,}", format_bytes(t.bytes), tiers[t.axis]]
        for t in shown
    ]
    if plan.job.layout.pp > 1:
        columns.append("pp rank")
        for row, traffic in zip(cells, shown, strict=True):
            row.append("all" if traffic.pp_rank is None else str(traffic.pp_rank))
    output.print()
    output.table(title, columns, cells)


def _describe_placement(output: Output, plan: PlanContract) -> None:
    """Print the ranks of each node; only that they are in rank order, if they are."""
    if plan.job.cluster.nodes == 1 and not plan.placement:
        return
    output.print()
    if not plan.placement:
        output.print(f"placement: rank order, {plan.rank_placement.per_node} slots per node")
        return
    placed = plan.rank_placement
    rank_at = {slot: str(rank) for rank, slot in enumerate(placed.slots)}
    starts = range(0, plan.job.cluster.nodes * placed.per_node, placed.per_node)
    rows = [
        (str(node), ", ".join(rank_at.get(first + device, "free") for device in range(placed.per_node)))
        for node, first in enumerate(starts[:MOST_NODES])
    ]
    left = len(starts) - len(rows)
    rows += [(f"{left} more", "see plan.toml, predicted.placement")] if left > 0 else []
    output.table("Placement", ("node", "ranks, in the order of devices"), rows)


def describe_ranking(output: Output, found: SearchResult, top: int) -> None:
    """Print the best layouts, and how many were searched."""
    rows = [_row(prediction, found.best[0]) for prediction in found.best[: min(top, MOST_ROWS)]]
    if len(rows) > 1:
        output.print()
        columns = ("layout", "step", "per device", "MFU", "needed", "step vs first")
        output.table("Layouts, recommended first", columns, rows)
    if found.job.layout.mode == "given":
        return
    output.print(f"\n{count_search(found)}")


def count_search(found: SearchResult) -> str:
    """How many layouts were searched."""
    seconds = format_seconds(found.seconds)
    how = "exactly" if found.best[0].exact else "by the estimate"
    parts = [
        f"{found.evaluated:,} layouts evaluated in {seconds}",
        f"{found.pruned:,} pruned by lower bounds of memory and time, {found.illegal:,} combinations illegal",
        f"{found.may_fit:,} may fit by these bounds",
        f"{found.checked:,} checked {how}, {len(found.best):,} of them fit",
    ]
    if found.stopped_early:
        parts.append(f"stopped at the time limit, {found.unseen:,} layouts not evaluated")
    return "; ".join(parts)


def _row(prediction: Prediction, best: Prediction) -> tuple[str, ...]:
    slower = prediction.step_s / best.step_s - 1
    return (
        describe_layout(prediction.layout),
        format_seconds(prediction.step_s),
        format_throughput(prediction.tokens_per_s / prediction.layout.world_size, prediction.job.unit),
        f"{prediction.mfu:.1%}",
        format_bytes(prediction.needed_bytes),
        "" if prediction is best else f"{slower:+.2%}",
    )
