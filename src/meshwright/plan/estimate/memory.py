"""Estimates the memory of a rank, by class of pipeline ranks, for every layout of a grid.

``weights`` and ``state`` count parameters and state, ``activations`` what blocks save for backward,
``memory_snapshots`` the points of a step (``eager`` for Meshwright's own), ``buffers`` buffers that live
through the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.layout.parameters import count_gradient_bytes, list_parameters, with_gradients
from meshwright.plan.estimate.balance import count_balanced
from meshwright.plan.estimate.buffers import sum_buffers
from meshwright.plan.estimate.compiled import may_keep_bf16_grads
from meshwright.plan.estimate.eager import list_eager_snapshots
from meshwright.plan.estimate.grid import OFFLOADS, Flags, Floats, Grid, Ints
from meshwright.plan.estimate.memory_snapshots import (
    SNAPSHOT_LINES,
    EstimateInputs,
    GridMemorySnapshot,
    list_snapshots,
)
from meshwright.plan.estimate.sizes import count_rank_parameters
from meshwright.plan.estimate.stages import CLASSES, Stage, split_stages
from meshwright.plan.estimate.state import STATE_LINES, state_lines
from meshwright.plan.estimate.terms import Sum
from meshwright.plan.estimate.weights import count_local_weights
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.fit import usable_bytes
from meshwright.spec.layout import Layout

LINES = (*STATE_LINES, *SNAPSHOT_LINES, "buffers", "allocator", "context")
EXCLUDED_LINES = {
    "allocated": ("allocator", "context"),
    "reserved": ("context",),
    "device": (),
    "formula": ("allocator", "context", "buffers", "logits", "workspace", "gathered"),
}
"""Lines that a way of counting memory leaves out: torch's allocated bytes, its reserved bytes, the device
bytes of nvidia-smi, and the formulas of papers (state and activations)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank with the highest peak, of each layout."""

    peak_bytes: Floats
    """Device memory at the peak: allocated, reserved by the allocator, and the CUDA context."""
    lines: dict[str, Floats]
    """Its lines, of the class of ranks with the highest peak; they sum to the peak."""
    classes: dict[str, Floats]
    """The peak of each class of pipeline ranks (first, middle, last); 0 where a layout has none."""
    state_before_optimizer_bytes: Floats
    """State after backward and before the optimizer step, nothing gathered; the largest of all classes."""
    cpu_bytes: Floats
    """CPU memory of a rank's offloaded state."""

    def fits(self, workload: Workload) -> Flags:
        """Flags of layouts within the usable memory of a device and its share of CPU memory."""
        cluster = workload.cluster
        local = self.cpu_bytes <= (cluster.host_memory_bytes or np.inf)
        return np.asarray((self.peak_bytes <= usable_bytes(cluster)) & local)

    def counted_as(self, kind: str) -> Floats:
        """The peak as `allocated`, `reserved`, `device` or `formula` counts it."""
        return self.peak_bytes - sum(
            (self.lines[name] for name in EXCLUDED_LINES[kind]), np.zeros(len(self.peak_bytes))
        )


@dataclass(frozen=True)
class StageLedger:
    """One class of ranks at its peak."""

    stage: Stage
    state: dict[str, Sum]
    snapshots: list[GridMemorySnapshot]
    peak_index: Ints
    """Which snapshot is the peak, per layout."""
    buffers: Sum
    lines: dict[str, Floats]
    peak: Floats
    state_before_optimizer: Floats


def estimate_memory(workload: Workload, grid: Grid) -> MemoryEstimate:
    """The rank with the highest peak of each layout, line by line."""
    ledgers = build_stage_ledgers(workload, grid)
    peaks = [np.where(ledger.stage.exists, ledger.peak, 0.0) for ledger in ledgers]
    states = [np.where(ledger.stage.exists, ledger.state_before_optimizer, 0.0) for ledger in ledgers]
    largest = np.argmax(peaks, axis=0)
    classes = {name: np.zeros(len(grid)) for name in CLASSES}
    classes.update({ledger.stage.name: peak for ledger, peak in zip(ledgers, peaks, strict=True)})
    return MemoryEstimate(
        peak_bytes=np.maximum.reduce(peaks),
        lines={
            name: _column(_choose(largest, [ledger.lines[name] for ledger in ledgers]), grid)
            for name in LINES
        },
        classes=classes,
        state_before_optimizer_bytes=np.maximum.reduce(states),
        cpu_bytes=_cpu_bytes(workload, grid),
    )


def _cpu_bytes(workload: Workload, grid: Grid) -> Floats:
    """Float32 weights, Adam moments and gradients of a rank's shard; with `all`, also its 16-bit weights."""
    if not grid.offload.any():
        return np.zeros(len(grid))
    counts = count_rank_parameters(workload.model, grid)
    kept = (counts.rank + counts.expert_rank) / np.where(grid.zero == 3, grid.dp_shard * grid.cp, 1)
    bytes_ = 16.0 * counts.updated(grid) + np.where(grid.offload == OFFLOADS.index("all"), 2.0 * kept, 0.0)
    return np.where(grid.offload > 0, bytes_, 0.0)


def build_stage_ledgers(workload: Workload, grid: Grid) -> list[StageLedger]:
    """The classes of ranks that any layout of the grid has."""
    inputs = EstimateInputs.of(workload, grid)
    balanced = workload.profile.time.balances_stages_by_parameters
    given = count_balanced(workload.model, grid.pp) if balanced else None
    stages = split_stages(workload.model, grid, workload.global_batch, given)
    return [
        _build_stage_ledger(inputs, stage) for stage in stages if stage is stages[0] or stage.exists.any()
    ]


def _build_stage_ledger(inputs: EstimateInputs, stage: Stage) -> StageLedger:
    """The lines of one class at its peak."""
    workload, grid = inputs.workload, inputs.grid
    rules, cuda = workload.profile.memory, workload.cluster.device == "cuda"
    local = count_local_weights(workload.model, inputs.weights, grid, stage, rules.vocabulary_multiple)
    state = state_lines(workload, grid, local, inputs.sharding)
    snapshots = (list_eager_snapshots if rules.blocks == "eager" else list_snapshots)(inputs, stage, local)
    lines = {name: _column(value.bytes, grid) for name, value in state.items()}
    between = sum(lines.values(), np.zeros(len(grid))) - _count_bf16_savings(workload, grid)
    peak_index = _find_peaks(snapshots, lines["gradients"])
    lines["gradients"] = lines["gradients"] * _column(
        _choose(peak_index, [m.gradients for m in snapshots]), grid
    )
    for name in SNAPSHOT_LINES:
        lines[name] = _column(_choose(peak_index, [getattr(m, name).bytes for m in snapshots]), grid)
    buffers = sum_buffers(inputs, stage, local)
    lines["buffers"] = _column(buffers.bytes, grid)
    allocated = sum(lines.values(), np.zeros(len(grid)))
    lines["allocator"] = allocated * (rules.reserve if cuda else 0.0)
    lines["context"] = np.full(len(grid), rules.context_bytes if cuda else 0.0)
    peak = allocated + lines["allocator"] + lines["context"]
    return StageLedger(stage, state, snapshots, peak_index, buffers, lines, peak, between)


def _count_bf16_savings(workload: Workload, grid: Grid) -> Floats:
    """Bytes that 16-bit gradients save between passes; the snapshots have counted them."""
    job = workload.compiled_job
    if job is None:
        return np.zeros(len(grid))
    one = dataclasses.replace(job, layout=Layout("given", micro_batch=job.train.global_batch))
    parameters = list_parameters(one.model)
    saved = count_gradient_bytes(parameters) - count_gradient_bytes(with_gradients(one, parameters))
    return np.where(
        may_keep_bf16_grads(grid) & (grid.micro_batch >= job.train.global_batch), float(saved), 0.0
    )


def _find_peaks(snapshots: list[GridMemorySnapshot], gradients: Floats) -> Ints:
    """The index of the largest snapshot, per layout."""
    best = np.full(len(gradients), -1.0)
    which = np.zeros(len(gradients), dtype=np.int64)
    for number, snapshot in enumerate(snapshots):
        total = (
            snapshot.activations.bytes
            + snapshot.logits.bytes
            + snapshot.workspace.bytes
            + snapshot.gathered.bytes
        )
        total = np.where(snapshot.possible, total + snapshot.gradients * gradients, -1.0)
        larger = total > best
        best, which = np.where(larger, total, best), np.where(larger, number, which)
    return which


def _column(value: Floats | float, grid: Grid) -> Floats:
    return np.broadcast_to(np.asarray(value, dtype=np.float64), (len(grid),))


def _choose(which: Ints, columns: Sequence[Floats | float]) -> Floats | float:
    """The chosen one of several columns, per layout."""
    chosen = columns[0]
    different = [number for number, column in enumerate(columns) if not _same(column, chosen)]
    for number in different:
        chosen = np.where(which == number, columns[number], chosen)
    return chosen


def _same(one: Floats | float, other: Floats | float) -> bool:
    return one is other or (isinstance(one, float) and isinstance(other, float) and one == other)
