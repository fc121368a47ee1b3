"""The memory ledger: what one rank holds, line by line, each with its formula.

State is exact to the byte. The peak is the largest of the moments that the model's own module lists
(``decoder_memory``, ``compiled_memory``, ``resnet_memory``). It counts live tensors, not the process and not
the allocator's slack.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.units import MIB
from meshwright.layout.axes import dense_shard_axis, gradient_axis, uses_ddp
from meshwright.layout.ddp_buckets import local_buckets
from meshwright.layout.fsdp_groups import sharded_state
from meshwright.layout.optimizer_offload import STAGING_BUFFERS, offloaded_state, staging_bytes
from meshwright.layout.optimizer_state import UPDATE_CHUNK, UPDATE_CHUNK_BYTES, predict_optimizer
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, Parameter, count_gradient_bytes
from meshwright.layout.pipeline_schedules import schedule_version
from meshwright.layout.stages import local_parameter_kinds, local_parameters, representative_pp_rank
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.contract import Line
from meshwright.plan.memory.compiled import is_compiled, trace_compiled, weight_copies_line
from meshwright.plan.memory.decoder import trace_decoder
from meshwright.plan.memory.fsdp import find_fsdp_peak
from meshwright.plan.memory.pipeline import PipelineMemory, trace_pipeline
from meshwright.plan.memory.resnet import trace_resnet
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
"""What the matrix libraries take on a Hopper GPU (measured on one H200, torch 2.11)."""


@dataclass(frozen=True)
class Ledger:
    """Memory of one rank."""

    lines: tuple[Line, ...]
    state_bytes: dict[str, int]
    """Parameters, gradients, optimizer; after backward, before the optimizer's step."""
    peak_bytes: int
    """Largest sum of live tensors from forward to backward."""
    peak_at: str
    """Where in the step that is."""
    first_peak_bytes: int
    """The same in the first step of an attempt."""
    activation_bytes: int
    """Activations that one micro-batch keeps from forward to backward."""
    touched_bytes: int
    """The same without recomputation: a measure of the traffic that is not matrix products."""


def predict_ledger(
    job: Job, micro_batch: int, micro_batches: int, pp_rank: int = 0, rows: Sequence[int] | None = None
) -> Ledger:
    """What a rank holds, at one place of the pipelines; of the ranks that share it the first, the fullest.

    Args:
        job: With its layout settled.
        micro_batch: Samples of one forward pass.
        micro_batches: Of a step.
        pp_rank: The rank's index on the axis ``pp``.
        rows: That experts read in each of the rank's layers with experts; None for an even share of all.
    """
    if job.layout.pp > 1:
        return _predict_pipeline(job, pp_rank, trace_pipeline(job, pp_rank, micro_batch, micro_batches, rows))
    parameters = local_parameter_kinds(job, pp_rank)
    if job.layout.zero >= 2:
        return _predict_sharded(job, parameters, micro_batch, micro_batches, rows)
    state, optimizer = _predict_state(job, parameters, rank=0)
    count = sum(p.count for p in parameters)
    persistent_grads = find_persistent_grads(job, micro_batches)
    memory = _trace(job, parameters, micro_batch, persistent_grads, rows)
    buckets = _sent_buckets(job)
    top = max(memory.snapshots, key=lambda snapshot: snapshot.bytes + _wire_bytes(buckets, snapshot))
    lines = [
        Line("parameters", state["parameters"], f"{count} x 4 (float32)"),
        *_optimizer_lines(job, state["optimizer"], optimizer),
        Line("gradients at peak", top.gradients, f"of {_describe_gradients(parameters)}"),
        Line("activations at peak", top.activations, top.formula),
        Line(
            "temporary buffers at peak", top.temporary + _wire_bytes(buckets, top), f"largest at: {top.name}"
        ),
        *memory.buffers,
    ]
    ledger = _add_up(job, lines, state, top.name, memory)
    if uses_ddp(job) and micro_batches > 1:
        alone = _trace(job, parameters, micro_batch, PersistentGrads(), rows)
        first_more = _second_copy(memory, alone, buckets, state["gradients"], micro_batches)
        first_more -= top.bytes + _wire_bytes(buckets, top)
        return dataclasses.replace(ledger, first_peak_bytes=ledger.peak_bytes + first_more)
    return ledger


def _describe_gradients(parameters: Sequence[Parameter]) -> str:
    """Elements and the bytes of each."""
    counts = Counter[int]()
    for parameter in parameters:
        counts[parameter.gradient_bytes] += parameter.count
    kinds = {FLOAT32_BYTES: "float32"}
    return " + ".join(f"{count} x {each} ({kinds.get(each, '16 bits')})" for each, count in counts.items())


def _predict_state(job: Job, parameters: Sequence[Parameter], rank: int) -> tuple[dict[str, int], str]:
    """State that is whole, or of which ZeRO-1 cuts the optimizer's; and the formula of that."""
    optimizer = predict_optimizer(parameters, job.train)
    if job.layout.zero == 1:
        return sharded_state(
            job, rank
        ), f"{optimizer.formula}, rows over {dense_shard_axis(job.layout).size} ranks"
    size, gradients = sum(p.count for p in parameters) * FLOAT32_BYTES, count_gradient_bytes(parameters)
    return {"parameters": size, "gradients": gradients, "optimizer": optimizer.state_bytes}, optimizer.formula


def _predict_pipeline(job: Job, pp_rank: int, memory: PipelineMemory) -> Ledger:
    """What a rank of a pipeline holds: its stages, and what they keep of all in-flight micro-batches."""
    state, held = _predict_stages(job, representative_pp_rank(job, pp_rank), schedule_version(job))
    top = memory.top
    lines = [
        *held,
        Line("gradients at peak", top.gradients, f"of {state['gradients']}"),
        *([Line("all-gathered parameters", top.gathered, "ZeRO")] if job.layout.zero >= 2 else ()),
        Line("in-flight activations", top.waiting, top.waiting_formula),
        Line("activations at peak", top.activations, top.formula),
        Line("temporary buffers at peak", top.temporary, f"largest at: {top.name}"),
        Line("pipeline send buffers", top.handed, top.handed_formula),
        *memory.buffers,
    ]
    return _add_up(job, lines, dict(state), top.name, memory)


@functools.lru_cache(maxsize=256)
def _predict_stages(job: Job, pp_rank: int, version: int) -> tuple[dict[str, int], tuple[Line, ...]]:
    """The state of the stages at the first of alike places, and its lines: parameters and optimizer.

    ``version`` is that of the schedule's file.
    """
    rank, parameters = pp_rank * (job.layout.world_size // job.layout.pp), local_parameter_kinds(job, pp_rank)
    if job.layout.zero >= 2:
        state = sharded_state(job, rank)
        ranks = dense_shard_axis(job.layout).size
        formula = f"the state of these rows, not padded, over {ranks} ranks"
    else:
        state, formula = _predict_state(job, parameters, rank)
    away = offloaded_state(job, state)["parameters"]
    held = "padded rows" if job.layout.zero >= 2 else str(sum(p.count for p in parameters))
    size, sized = state["parameters"] - away, f"{away} on the host" if away else f"{held} x 4 (float32)"
    lines = _optimizer_lines(job, state["optimizer"], formula, rank)
    return state, (Line("parameters", size, sized), *lines)


def _predict_sharded(
    job: Job,
    parameters: Sequence[Parameter],
    micro_batch: int,
    micro_batches: int,
    rows: Sequence[int] | None,
) -> Ledger:
    """What a rank of ZeRO-2 or 3 holds: its shards, and what is all-gathered parameters."""
    model = local_model(job)
    assert not isinstance(model, ResNetModel), "the legality table shards decoders only"
    state = sharded_state(job, rank=0)
    memory = trace_decoder(job, model, parameters, micro_batch, PersistentGrads(), rows)
    top = find_fsdp_peak(job, memory.snapshots, micro_batches)
    ranks, away = dense_shard_axis(job.layout).size, offloaded_state(job, state)["parameters"]
    formula = f"rows over {ranks} ranks, padded, x 4 (float32)"
    lines = [
        Line("parameters", state["parameters"] - away, f"{away} on the host" if away else formula),
        *_optimizer_lines(
            job, state["optimizer"], f"the state of these rows, not padded, over {ranks} ranks"
        ),
        Line("gradients at peak", top.gradients, "shards, and whole ones not yet reduced"),
        Line("all-gathered parameters", top.gathered, top.gathered_formula),
        Line(
            "reduce-scatter inputs",
            top.reduced,
            f"what a reduce-scatter was given, x {WIRE_BYTES[job.compression.kind]}",
        ),
        Line("activations at peak", top.activations, top.formula),
        Line("temporary buffers at peak", top.temporary, f"largest at: {top.name}"),
        *memory.buffers,
    ]
    return _add_up(job, lines, state, top.name, memory)


def _add_up(
    job: Job, lines: list[Line], state: dict[str, int], peak_at: str, memory: StepMemory | PipelineMemory
) -> Ledger:
    """The ledger of these lines, and of what a GPU's libraries take."""
    if uses_fused_adamw(job):
        each = UPDATE_CHUNK * 2 * FLOAT32_BYTES  # two moments
        formula = f"{state['optimizer']} / {each} x {UPDATE_CHUNK_BYTES}"
        lines.append(Line("optimizer kernel table", state["optimizer"] // each * UPDATE_CHUNK_BYTES, formula))
    if job.cluster.device == "cuda":
        lines.append(Line("cuBLAS workspace", GPU_WORKSPACE_BYTES, "cuBLAS and cuBLASLt, 32 MiB each"))
    peak = sum(line.bytes for line in lines)
    return Ledger(tuple(lines), state, peak, peak_at, peak, memory.activation_bytes, memory.touched_bytes)


def _optimizer_lines(job: Job, state: int, formula: str, rank: int = 0) -> list[Line]:
    """The optimizer's state, or the buffers through which it is streamed."""
    if job.layout.offload == "none":
        return [Line("optimizer", state, formula)]
    lines = [Line("optimizer", 0, f"{state} on the host")]
    if buffers := staging_bytes(job, rank):
        lines.append(
            Line(
                "offload buffers",
                buffers,
                f"up to {STAGING_BUFFERS} buckets of it: arriving, at work, leaving",
            )
        )
    return lines


def _trace(
    job: Job,
    parameters: Sequence[Parameter],
    micro_batch: int,
    persistent_grads: PersistentGrads,
    rows: Sequence[int] | None,
) -> StepMemory:
    """The moments of the job's model."""
    model = local_model(job)
    if isinstance(model, ResNetModel):
        return trace_resnet(job, model, parameters, micro_batch, persistent_grads.dense)
    memory = trace_decoder(job, model, parameters, micro_batch, persistent_grads, rows)
    if is_compiled(job):
        memory = trace_compiled(job, model, parameters, micro_batch, persistent_grads, memory)
    if not uses_bf16_weight_copies(job):
        return memory
    return dataclasses.replace(memory, buffers=(*memory.buffers, weight_copies_line(job, model)))


def _second_copy(
    kept: StepMemory, alone: StepMemory, buckets: _SentBuckets, gradients: int, micro_batches: int
) -> int:
    """The largest moment of an attempt's first step, when DDP has not yet reduced once.

    Accumulated gradients are then not views of its buckets, which lie beside them. The first micro-batch
    makes them one by one; middle ones hold both whole; in the last each becomes a view when it is complete.
    """
    largest = max(snapshot.bytes + gradients for snapshot in alone.snapshots)
    for snapshot in kept.snapshots:
        waiting = gradients - snapshot.complete_bytes
        largest = max(largest, snapshot.bytes + waiting + _wire_bytes(buckets, snapshot))
        if micro_batches > 2:
            largest = max(largest, snapshot.bytes + gradients)
    return largest


@dataclass(frozen=True)
class _SentBuckets:
    """Buckets of gradients that are sent in a smaller type, in the order in which they are complete."""

    complete_bytes: tuple[int, ...] = ()
    """Gradients, in the order of the backward pass, by which each is complete."""
    wire_bytes: tuple[int, ...] = (0,)
    """What lives of those that are sent, when none is complete, one, two and so on."""


def _sent_buckets(job: Job) -> _SentBuckets:
    """The buckets that are copied to be sent; none without compression.

    What DDP sends lives until it has arrived: at most the largest is there. What else is sent lives until all
    are summed.
    """
    if job.compression.kind == "none":
        return _SentBuckets()
    sizes = {p.name: p.count for p in local_parameters(job, pp_rank=0)}
    complete, total = {}, 0
    for name in reversed(sizes):
        total += sizes[name] * FLOAT32_BYTES
        complete[name] = total
    buckets = sorted(
        (
            max(complete[name] for name in names),
            sum(sizes[name] for name in names) * WIRE_BYTES[job.compression.kind],
        )
        for names in local_buckets(job, pp_rank=0)
        if gradient_axis(job, names[0]).size > 1
    )
    together = max if uses_ddp(job) else operator.add
    wires = itertools.accumulate((wire for _, wire in buckets), together, initial=0)
    return _SentBuckets(tuple(at for at, _ in buckets), tuple(wires))


def _wire_bytes(buckets: _SentBuckets, snapshot: MemorySnapshot) -> int:
    """The copies in a smaller type that may be there at a moment."""
    return buckets.wire_bytes[bisect.bisect_right(buckets.complete_bytes, snapshot.complete_bytes)]
