"""The memory ledger: what one rank holds, line by line, each with its formula.

State is exact to the byte. The peak is the largest of the moments that the model's own module lists
(``decoder_memory``). It counts live tensors, not the process and not the allocator's slack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.units import MIB
from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.comms import WIRE_BYTES
from meshwright.plan.decoder_memory import trace_decoder
from meshwright.plan.moments import Line, StepMemory
from meshwright.plan.optimizer import predict_optimizer
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, list_parameters
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

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
    kept_bytes: int
    """Activations that one micro-batch keeps from forward to backward."""
    touched_bytes: int
    """The same without recomputation: a measure of the traffic that is not matrix products."""


def predict_ledger(job: Job, micro_batch: int, micro_batches: int) -> Ledger:
    """What a rank of a replicated layout holds."""
    parameters = list_parameters(job.model)
    count = sum(p.count for p in parameters)
    optimizer = predict_optimizer(parameters, job.train)
    state = {
        "parameters": count * FLOAT32_BYTES,
        "gradients": count * FLOAT32_BYTES,
        "optimizer": optimizer.state_bytes,
    }
    # DDP keeps its buckets; accumulation keeps the sums: either way all gradients live through the step.
    sums_kept = job.layout.dp_replicate > 1 or micro_batches > 1
    memory = _trace(job, parameters, micro_batch, sums_kept)
    wire = _wire_bytes(job, parameters)
    top = max(memory.moments, key=lambda moment: moment.bytes + wire * moment.reducing)
    lines = [
        Line("parameters", state["parameters"], f"{count} x 4 (float32)"),
        Line("optimizer", optimizer.state_bytes, optimizer.formula),
        Line("gradients at the peak", top.gradients, f"of {count} x 4 (float32)"),
        Line("activations", top.activations, top.formula),
        Line("temporary", top.temporary + wire * top.reducing, f"largest at: {top.name}"),
        *memory.always,
    ]
    if job.cluster.device == "cuda":
        lines.append(Line("library workspace", GPU_WORKSPACE_BYTES, "cuBLAS and cuBLASLt, 32 MiB each"))
    peak = sum(line.bytes for line in lines)
    # Until DDP has reduced once, accumulated gradients are not yet views of its buckets: a second copy.
    second_copy = state["gradients"] if job.layout.dp_replicate > 1 and micro_batches > 1 else 0
    return Ledger(
        lines=tuple(lines),
        state_bytes=state,
        peak_bytes=peak,
        peak_at=top.name,
        first_peak_bytes=peak + second_copy,
        kept_bytes=memory.kept_bytes,
        touched_bytes=memory.touched_bytes,
    )


def _trace(job: Job, parameters: Sequence[Parameter], micro_batch: int, sums_kept: bool) -> StepMemory:
    """The moments of the job's model."""
    assert isinstance(job.model, DecoderModel), "only decoders are planned yet"
    return trace_decoder(job, job.model, parameters, micro_batch, sums_kept)


def _wire_bytes(job: Job, parameters: Sequence[Parameter]) -> int:
    """The copy that a compressed all-reduce sends."""
    if job.compression.kind == "none" or job.layout.dp_replicate == 1:
        return 0
    sizes = {p.name: p.count for p in parameters}
    buckets = bucket_parameters(parameters, job.layout.bucket_mb)
    return max(sum(sizes[name] for name in bucket) for bucket in buckets) * WIRE_BYTES[job.compression.kind]
