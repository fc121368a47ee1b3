"""The memory ledger of one rank: live bytes at the peak of a step, line by line, each with its formula.

State is exact to the byte. The peak is the largest snapshot of the walked step (``decoder``, ``compiled``,
``resnet``, ``pipeline``; ``fsdp`` adds to a decoder's). It counts live tensors, not the process and not the
allocator's reserve.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.core.units import MIB
from meshwright.layout.axes import dense_shard_axis, gradient_axis, uses_ddp
from meshwright.layout.backup_replicas import padded_buckets
from meshwright.layout.ddp_buckets import local_buckets
from meshwright.layout.fsdp_groups import sharded_state_bytes
from meshwright.layout.hierarchy import Hierarchy, bucket_sizes, find_hierarchy
from meshwright.layout.optimizer_offload import STAGING_BUFFERS, offloaded_state, staging_bytes
from meshwright.layout.optimizer_state import UPDATE_CHUNK, UPDATE_CHUNK_BYTES, predict_optimizer
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, Parameter, count_gradient_bytes
from meshwright.layout.pipeline_schedules import schedule_version
from meshwright.layout.stages import local_parameter_kinds, local_parameters, representative_pp_rank
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.contract import Line
from meshwright.plan.memory.compiled import is_compiled, walk_compiled, weight_copies_line
from meshwright.plan.memory.decoder import walk_decoder
from meshwright.plan.memory.fsdp import find_fsdp_peak
from meshwright.plan.memory.pipeline import walk_pipeline
from meshwright.plan.memory.resnet import walk_resnet
from meshwright.plan.memory.snapshots import (
    MemorySnapshot,
    PersistentGrads,
    StepMemory,
    find_persistent_grads,
)
from meshwright.spec.execution import uses_bf16_weight_copies, uses_fused_adamw
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel

GPU_WORKSPACE_BYTES = 64 * MIB
"""Workspaces of cuBLAS and cuBLASLt on a Hopper GPU (measured on one H200, torch 2.11)."""


@dataclass(frozen=True)
class Ledger:
    """Memory of one rank."""

    lines: tuple[Line, ...]
    state_bytes: dict[str, int]
    """Parameters, gradients, optimizer; after backward, before the optimizer step."""
    peak_bytes: int
    """Peak of live tensors in forward and backward."""
    peak_at: str
    """Where in the step the peak is."""
    first_peak_bytes: int
    """The peak in the first step of an attempt."""
    activation_bytes: int
    """Activations that one micro-batch saves for backward."""
    touched_bytes: int
    """The same without activation checkpointing: for memory traffic outside of GEMMs."""


def predict_ledger(
    job: Job, micro_batch: int, micro_batches: int, pp_rank: int = 0, rows: Sequence[int] | None = None
) -> Ledger:
    """The ledger of pipeline rank ``pp_rank``: of its first data-parallel rank, which has the largest shards.

    Args:
        job: With its layout settled.
        micro_batch: Samples of one forward pass.
        micro_batches: Micro-batches of a step.
        pp_rank: The rank's index on the axis ``pp``.
        rows: Rows that experts read in each of the rank's MoE layers; None for an even share.
    """
    layout = job.layout
    if layout.pp > 1:
        memory = walk_pipeline(job, pp_rank, micro_batch, micro_batches, rows)
        return _write_ledger(job, pp_rank, memory, memory.snapshots[0])
    persistent_grads = PersistentGrads() if layout.zero >= 2 else find_persistent_grads(job, micro_batches)
    memory = _walk(job, micro_batch, persistent_grads, rows)
    if (hierarchy := find_hierarchy(job)) is not None:
        memory = replace(memory, buffers=(*memory.buffers, _hierarchy_line(job, hierarchy)))
    if layout.zero >= 2:
        return _write_ledger(job, pp_rank, memory, find_fsdp_peak(job, memory.snapshots, micro_batches))
    buckets = _compressed_buckets(job)
    peak = max(memory.snapshots, key=lambda snapshot: snapshot.bytes + buckets.live_bytes(snapshot))
    peak = replace(peak, temporary=peak.temporary + buckets.live_bytes(peak))
    ledger = _write_ledger(job, pp_rank, memory, peak)
    if not uses_ddp(job) or micro_batches == 1:
        return ledger
    alone = _walk(job, micro_batch, PersistentGrads(), rows)
    first = _find_first_peak(memory, alone, buckets, ledger.state_bytes["gradients"], micro_batches)
    return replace(ledger, first_peak_bytes=ledger.peak_bytes + first - peak.bytes)


def _walk(
    job: Job, micro_batch: int, persistent_grads: PersistentGrads, rows: Sequence[int] | None
) -> StepMemory:
    """The step of the job's model without a pipeline."""
    model, parameters = local_model(job), local_parameter_kinds(job, 0)
    if isinstance(model, ResNetModel):
        return walk_resnet(job, model, parameters, micro_batch, persistent_grads.dense)
    memory = walk_decoder(job, model, parameters, micro_batch, persistent_grads, rows)
    if is_compiled(job):
        memory = walk_compiled(job, model, parameters, micro_batch, persistent_grads, memory)
    if job.layout.backup_replicas:
        memory = replace(memory, buffers=(*memory.buffers, _backup_line(job)))
    if job.layout.zero >= 2 or not uses_bf16_weight_copies(job):
        return memory
    return replace(memory, buffers=(*memory.buffers, weight_copies_line(job, model)))


def _hierarchy_line(job: Job, hierarchy: Hierarchy) -> Line:
    """The buffers of the hierarchical all-reduce."""
    padded, shard = hierarchy.buffer_sizes(bucket_sizes(job))
    formula = f"largest padded bucket ({padded} x {FLOAT32_BYTES}) + its shard ({shard} x {FLOAT32_BYTES})"
    return Line("hierarchical all-reduce", (padded + shard) * FLOAT32_BYTES, formula)


def _backup_line(job: Job) -> Line:
    """The buffers of the gradient exchange of backup replicas."""
    largest = max(padded_buckets(job))
    formula = f"2 x largest bucket ({largest} x {FLOAT32_BYTES})"
    return Line("backup replicas", 2 * largest * FLOAT32_BYTES, formula)


def _write_ledger(job: Job, pp_rank: int, memory: StepMemory, peak: MemorySnapshot) -> Ledger:
    """The lines of a rank at its peak."""
    first = representative_pp_rank(job, pp_rank) if job.layout.pp > 1 else 0
    state = _count_state(job, first, schedule_version(job))
    lines = [*state.lines, *_list_peak_lines(job, peak, state.grads_formula), *memory.buffers]
    optimizer = state.bytes["optimizer"]
    if uses_fused_adamw(job):
        each = UPDATE_CHUNK * 2 * FLOAT32_BYTES  # two moments
        formula = f"{optimizer} / {each} x {UPDATE_CHUNK_BYTES}"
        lines.append(Line("optimizer kernel table", optimizer // each * UPDATE_CHUNK_BYTES, formula))
    if job.cluster.device == "cuda":
        lines.append(Line("cuBLAS workspace", GPU_WORKSPACE_BYTES, "cuBLAS and cuBLASLt, 32 MiB each"))
    total = sum(line.bytes for line in lines)
    return Ledger(
        lines=tuple(lines),
        state_bytes=dict(state.bytes),
        peak_bytes=total,
        peak_at=peak.name,
        first_peak_bytes=total,
        activation_bytes=memory.activation_bytes,
        touched_bytes=memory.touched_bytes,
    )


def _list_peak_lines(job: Job, peak: MemorySnapshot, grads_formula: str) -> list[Line]:
    """Gradients, activations and buffers at the peak."""
    pipelined, fsdp = job.layout.pp > 1, job.layout.zero >= 2
    lines = [Line("gradients at peak", peak.gradients, grads_formula)]
    if fsdp:
        lines.append(Line("all-gathered parameters", peak.gathered, peak.gathered_formula))
    if fsdp and not pipelined:
        formula = f"unreduced gradients as sent, x {WIRE_BYTES[job.compression.kind]}"
        lines.append(Line("reduce-scatter inputs", peak.reduce_inputs, formula))
    if pipelined:
        lines.append(Line("in-flight activations", peak.in_flight, peak.in_flight_formula))
    lines.append(Line("activations at peak", peak.activations, peak.formula))
    lines.append(Line("temporary buffers at peak", peak.temporary, f"largest at: {peak.name}"))
    if pipelined:
        lines.append(Line("pipeline send buffers", peak.send_buffers, peak.send_formula))
    return lines


class _State(NamedTuple):
    """State of a rank, and its lines: parameters and optimizer."""

    bytes: dict[str, int]
    lines: tuple[Line, ...]
    grads_formula: str


@functools.lru_cache(maxsize=256)
def _count_state(job: Job, pp_rank: int, version: int) -> _State:
    """The state of the first of several identical pipeline ranks.

    ``version`` is that of the schedule's file.
    """
    parameters = local_parameter_kinds(job, pp_rank)
    rank = pp_rank * (job.layout.world_size // job.layout.pp)
    optimizer, shards = predict_optimizer(parameters, job.train), dense_shard_axis(job.layout).size
    count, formula = sum(p.count for p in parameters), optimizer.formula
    sized, grads_formula = f"{count} x 4 (float32)", f"of {_describe_gradients(parameters)}"
    if job.layout.zero == 0:
        grads = count_gradient_bytes(parameters)
        sizes = count * FLOAT32_BYTES, grads, optimizer.state_bytes
        state = dict(zip(("parameters", "gradients", "optimizer"), sizes, strict=True))
    else:
        state, formula = sharded_state_bytes(job, rank), f"{formula}, rows over {shards} ranks"
    if job.layout.zero >= 2:
        sized = f"rows over {shards} ranks, padded, x 4 (float32)"
        formula = f"the state of these rows, not padded, over {shards} ranks"
        grads_formula = "sharded, and unsharded ones not yet reduced"
    if away := offloaded_state(job, state)["parameters"]:
        sized = f"{away} on the CPU"
    lines = (
        Line("parameters", state["parameters"] - away, sized),
        *_optimizer_lines(job, state["optimizer"], formula, rank),
    )
    return _State(state, lines, grads_formula)


def _describe_gradients(parameters: Sequence[Parameter]) -> str:
    """Elements by bytes per element."""
    counts = Counter[int]()
    for parameter in parameters:
        counts[parameter.gradient_bytes] += parameter.count
    kinds = {FLOAT32_BYTES: "float32"}
    return " + ".join(f"{count} x {each} ({kinds.get(each, '16 bits')})" for each, count in counts.items())


def _optimizer_lines(job: Job, state: int, formula: str, rank: int) -> list[Line]:
    """Optimizer state on the device, or its offload buffers."""
    if job.layout.offload == "none":
        return [Line("optimizer", state, formula)]
    lines = [Line("optimizer", 0, f"{state} on the CPU")]
    if buffers := staging_bytes(job, rank):
        formula = f"up to {STAGING_BUFFERS} buckets: being read, updated, written"
        lines.append(Line("offload buffers", buffers, formula))
    return lines


def _find_first_peak(
    memory: StepMemory, alone: StepMemory, buckets: _CompressedBuckets, gradients: int, micro_batches: int
) -> int:
    """The largest snapshot of an attempt's first step, before DDP's first reduction.

    Accumulated gradients are then not views of the buckets, which live beside them. The first micro-batch
    makes the gradients one by one; middle ones hold both in full; in the last one each becomes a view when it
    is final.

    Args:
        memory: The step with persistent gradients.
        alone: The step without.
        buckets: Buckets of compressed gradients.
        gradients: Bytes of all gradients.
        micro_batches: Micro-batches of a step.
    """
    largest = max(snapshot.bytes + gradients for snapshot in alone.snapshots)
    for snapshot in memory.snapshots:
        not_final = gradients - snapshot.ready_grads
        largest = max(largest, snapshot.bytes + not_final + buckets.live_bytes(snapshot))
        if micro_batches > 2:
            largest = max(largest, snapshot.bytes + gradients)
    return largest


@dataclass(frozen=True)
class _CompressedBuckets:
    """Compressed gradient buckets, in the order in which they become ready."""

    ready_grads: tuple[int, ...] = ()
    """Final gradients, in backward order, at which each bucket is ready."""
    wire_bytes: tuple[int, ...] = (0,)
    """Live compressed copies after none, one, two, … ready buckets."""

    def live_bytes(self, snapshot: MemorySnapshot) -> int:
        """The compressed copies that may be live at a snapshot."""
        return self.wire_bytes[bisect.bisect_right(self.ready_grads, snapshot.ready_grads)]


def _compressed_buckets(job: Job) -> _CompressedBuckets:
    """The buckets that are copied into a smaller type; none without compression.

    DDP frees a compressed bucket after its all-reduce: at most the largest is live. Other buckets live until
    all are reduced.
    """
    if job.compression.kind == "none":
        return _CompressedBuckets()
    sizes = {p.name: p.count for p in local_parameters(job, pp_rank=0)}
    ready, total = {}, 0
    for name in reversed(sizes):
        total += sizes[name] * FLOAT32_BYTES
        ready[name] = total
    buckets = sorted(
        (
            max(ready[name] for name in names),
            sum(sizes[name] for name in names) * WIRE_BYTES[job.compression.kind],
        )
        for names in local_buckets(job, pp_rank=0)
        if gradient_axis(job, names[0]).size > 1
    )
    live = max if uses_ddp(job) else operator.add
    wires = itertools.accumulate((wire for _, wire in buckets), live, initial=0)
    return _CompressedBuckets(tuple(at for at, _ in buckets), tuple(wires))
