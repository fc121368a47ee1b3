"""Step time from operations that ``meshwright probe`` measured on the device.

The step of a dense decoder without tensor, context or pipeline parallelism::

    GEMMs + attention + elementwise x moved bytes / copy bandwidth + blocks x CPU launch time
        + passes over parameters (CPU) + update + rest

**GEMMs** by shape: forward, input gradient, weight gradient; merged linears (q, k, v; gate, up) are one
GEMM. A probed shape takes its measured time. Another shape is estimated (FLOPs at the best probed rate,
wave quantization, operand traffic) and corrected by the error of that estimate at the nearest probed
shapes. **Attention** likewise, by head size, sequence length and number of heads. **Moved bytes** are those
of all other work: norms, RoPE, activation functions, additions, the loss, the gradient norm. Their time
relative to a copy is measured for Triton blocks (``triton_block_bytes``). For other backends it is fitted
to a few real steps, like the CPU launch time of a block and the rest (:func:`fit_steps`). A GPU hides CPU
launch time unless that is longer.

A GPU under load is power-limited. Each operation alone runs at its own clock; in a step all run at a clock in
between. So in a step GEMMs take less than alone and attention more, but the sum hardly changes: on an H200
(16 Nov 2026) -4.5% and +9% of 356 and 87 ms, the sum -1.8%. Sums are predicted well, parts less so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout.axes import uses_ddp
from meshwright.layout.gemms import KINDS, Kind, Linear, is_fp8_gemm, list_linears
from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    count_parameters,
    list_parameters,
    operand_bytes,
    residual_bytes,
    with_gradients,
)
from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.time import triton_block_bytes
from meshwright.plan.time.activation_bytes import count_passes, touched_bytes
from meshwright.plan.time.gemm import tile_share
from meshwright.spec.execution import (
    autotunes_gemms,
    uses_bf16_weight_copies,
    uses_eager_blocks,
    uses_triton_blocks,
)
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.probed import AttentionTime, GemmTime, Precision, Probed

BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward pass, over the forward pass: five matmuls over two."""
NEARNESS = 0.01
"""Squared distance (in log2 of the sizes) within which a probed shape counts as equal."""
AUTOTUNED_TIME = 0.98
"""Time of autotuned GEMMs, over the library's heuristic choice, which is probed: 0.978 and 0.986 in full
steps of two models on an H200 (16 Nov 2026, docs/log.md)."""
HEAD_SIZE_WEIGHT, HEADS_WEIGHT = 4.0, 0.5
"""Weight of a doubling, relative to a doubling of the sequence length. Another head size is another kernel.
Twice the heads take twice the time once they fill the device."""
BUCKET_ACCESSES = 4.0
"""Accesses to each gradient in DDP's buckets, beside those of a gradient of one process: it is set to zero,
and the new gradient is read and added to it (read, written). One process drops the old gradient instead."""
LEAST_ELEMENTWISE = 0.05
"""Least value, where real steps leave no time for moved bytes."""


@dataclass(frozen=True)
class StepWork:
    """Parts of a step in seconds, from probed times."""

    gemm_s: float
    attention_s: float
    moved_s: float
    """All other memory traffic, at the bandwidth of a copy."""
    update_s: float
    blocks: int
    """Passes through blocks, forward and backward together; on a CPU embedding and head count as one more."""
    hides_cpu_launch: bool
    uses_triton: bool = False
    """Whether the Triton kernels move those bytes."""
    parameters_s: float = 0.0
    """One pass over the parameters of an eager model, at the bandwidth of a copy."""
    bucket_s: float = 0.0
    """Zeroing and accumulation of the gradients in DDP's buckets, at the bandwidth of a copy."""

    def compute_s(self, probed: Probed) -> float:
        """All parts but the optimizer step."""
        longer = probed.triton_elementwise if self.uses_triton else probed.elementwise
        device_s = self.gemm_s + self.attention_s + longer * self.moved_s
        device_s += probed.parameter_passes * self.parameters_s + self.bucket_s
        cpu_launch_s = self.blocks * probed.block_s
        work_s = max(device_s, cpu_launch_s) if self.hides_cpu_launch else device_s + cpu_launch_s
        return work_s + probed.step_s

    def total_s(self, probed: Probed) -> float:
        """The whole step."""
        return self.compute_s(probed) + self.update_s


class MeasuredStep(NamedTuple):
    """A measured step of a job on one device, with its activation bytes."""

    job: Job
    micro_batches: int
    touched_bytes: int
    step_s: float


def is_probed(job: Job) -> bool:
    """Whether this job's step is predicted from probed operations."""
    probed, model, layout = job.cluster.probed, job.model, job.layout
    if probed is None or not isinstance(model, DecoderModel):
        return False
    is_dense_attention = (
        model.num_experts is None and model.attention == "heads" and not model.windowed_layers
    )
    whole = layout.pp * layout.tp * layout.cp == 1 and layout.offload == "none"
    alone = layout.world_size == 1 or job.cluster.device == "cpu"  # several GPUs use the engine's estimate
    same = job.train.runtime == "meshwright" and (not uses_eager_blocks(job)) == probed.compiled
    if not uses_eager_blocks(job):
        same = same and job.train.compile_backend == "inductor"
    same = same and probed.device == job.cluster.device
    known = {entry.precision for entry in probed.gemms} & {entry.precision for entry in probed.attention}
    are_gemms_probed = _precision(job) in known
    if job.train.precision == "fp8":  # probed as the Triton blocks cast and multiply
        scaled = any(entry.precision == "fp8" for entry in probed.gemms)
        are_gemms_probed = are_gemms_probed and scaled and uses_triton_blocks(job)
    return is_dense_attention and whole and alone and same and job.data.mask == "causal" and are_gemms_probed


def with_probed(job: Job, probed: Probed) -> Job:
    """The job on a cluster with these probed times."""
    return dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, probed=probed))


def count_work(job: Job, micro_batches: int, touched_bytes: int) -> StepWork:
    """The parts of one rank's step.

    Args:
        job: For which :func:`is_probed` holds, with a complete layout.
        micro_batches: Micro-batches of the step.
        touched_bytes: Activation bytes of one micro-batch in an eager step.
    """
    model, probed = job.model, job.cluster.probed
    assert isinstance(model, DecoderModel), "decoders are probed"
    assert probed is not None, "only what was probed is counted here"
    times = _ProbedTimes.of(probed, _precision(job))
    scaled = _ProbedTimes.of(probed, "fp8") if job.train.precision == "fp8" else times
    full, uses_triton = job.layout.recompute == "full", uses_triton_blocks(job)
    autotuned = AUTOTUNED_TIME if autotunes_gemms(job) else 1.0
    gemm_s = attention_s = 0.0
    for linear in list_linears(job, model, micro_batches):
        kinds = (*KINDS, "forward") if full and linear.in_block else KINDS
        for kind in kinds:
            if is_fp8_gemm(job, linear, kind):
                gemm_s += linear.times * scaled.linear_s(kind, linear)
            else:
                gemm_s += linear.times * times.linear_s(kind, linear) * autotuned
    forward_s, backward_s = times.attention_s(job, model)
    attention_s = micro_batches * model.num_layers * (forward_s * (2 if full else 1) + backward_s)
    if uses_triton:
        moved = triton_block_bytes.step_bytes(job, model, micro_batches)
    elif not uses_eager_blocks(job):
        moved = _compiled_bytes(job, model, micro_batches)
    else:
        moved = micro_batches * touched_bytes * count_passes(job.layout.recompute)
    on_cpu = job.cluster.device == "cpu"
    pass_s = FLOAT32_BYTES * count_parameters(model) / probed.copy_bytes_per_s if on_cpu else 0.0
    return StepWork(
        gemm_s=gemm_s,
        attention_s=attention_s,
        moved_s=moved / probed.copy_bytes_per_s,
        update_s=_update_s(job, model, probed),
        blocks=micro_batches * (model.num_layers + on_cpu),
        hides_cpu_launch=job.cluster.device == "cuda",
        uses_triton=uses_triton,
        parameters_s=pass_s,
        bucket_s=BUCKET_ACCESSES * pass_s if uses_ddp(job) else 0.0,
    )


@dataclass(frozen=True)
class ProbedSteps:
    """Steps of a grid from probed times, one value per layout."""

    known: Flags
    """Layouts predicted from probed times; 0 elsewhere."""
    compute_s: Floats
    """Blocks, embedding and head of a step, with exposed CPU launch time."""
    update_s: Floats
    """Optimizer step over all parameters."""
    step_s: Floats
    """Step overhead outside the blocks."""


def probe_steps(workload: Workload, grid: Grid) -> ProbedSteps | None:
    """Steps of the layouts that probed times predict; None if there are none."""
    job = workload.probed_job
    if job is None or job.cluster.probed is None:
        return None
    probed, count = job.cluster.probed, len(grid)
    whole = (grid.pp * grid.tp * grid.cp == 1) & (grid.offload == 0)
    known = np.zeros(count, dtype=np.bool_)
    compute_s, update_s, step_s = np.zeros(count), np.zeros(count), np.zeros(count)
    if not whole.any():
        return None
    micro_batches = grid.micro_batches(workload.global_batch)
    touched = touched_bytes(workload, grid)
    found: dict[tuple[int, ...], tuple[float, float, float] | None] = {}
    columns = (grid.micro_batch, micro_batches, grid.recompute, grid.zero, grid.world_size)
    for index in np.flatnonzero(whole):
        key = tuple(int(column[index]) for column in columns)
        if key not in found:
            settled = dataclasses.replace(job, layout=grid.layout(int(index)))
            times = probed.select(min(key[-1], job.cluster.devices_per_node))
            found[key] = _probe_step(with_probed(settled, times), times, key[1], float(touched[index]))
        seconds = found[key]
        if seconds is not None:
            known[index], (compute_s[index], update_s[index], step_s[index]) = True, seconds
    return ProbedSteps(known, compute_s, update_s, step_s) if known.any() else None


def _probe_step(
    job: Job, probed: Probed, micro_batches: int, touched: float
) -> tuple[float, float, float] | None:
    """Blocks, embedding and head; the optimizer step; the step overhead."""
    if not is_probed(job):
        return None
    work = count_work(job, micro_batches, round(touched))
    return work.compute_s(probed) - probed.step_s, work.update_s, probed.step_s


def _precision(job: Job) -> Precision:
    """The probed precision of a job's attention and GEMMs, except fp8 GEMMs of blocks."""
    return "fp32" if job.train.precision == "fp32" else "bf16"


class _Probe(NamedTuple):
    """A probed shape: its coordinates in log space, and measured over estimated time."""

    coordinates: tuple[float, ...]
    ratio: float


@dataclass(frozen=True)
class _ProbedTimes:
    """Times of any shape, interpolated from the probed ones."""

    probed: Probed
    low: int
    rate: float
    """Best FLOP/s of the probed GEMMs."""
    attention_rate: float
    by_kind: dict[Kind, list[_Probe]]
    forward: list[_Probe]
    backward: list[_Probe]

    @classmethod
    def of(cls, probed: Probed, precision: Precision) -> _ProbedTimes:
        """GEMMs of a precision, and attention, which is never fp8."""
        low = {"fp32": 4, "bf16": 2, "fp8": 1}[precision]
        gemms = [entry for entry in probed.gemms if entry.precision == precision]
        beside = "bf16" if precision == "fp8" else precision
        attention = [entry for entry in probed.attention if entry.precision == beside]
        rate = max(_gemm_rate(entry, kind) for entry in gemms for kind in KINDS)
        attention_rate = max(_attention_flops(entry) / entry.forward_s for entry in attention)
        empty = cls(probed, low, rate, attention_rate, {}, [], [])
        by_kind = {kind: [empty._compare_gemm(entry, kind) for entry in gemms] for kind in KINDS}
        return dataclasses.replace(
            empty,
            by_kind=by_kind,
            forward=[empty._compare_attention(entry, 1.0, entry.forward_s) for entry in attention],
            backward=[
                empty._compare_attention(entry, BACKWARD_FLOPS, entry.backward_s) for entry in attention
            ],
        )

    def linear_s(self, kind: Kind, linear: Linear) -> float:
        """One GEMM of a linear layer."""
        sizes = _sizes(kind, linear.rows, linear.columns, linear.depth)
        return self._count_gemm(sizes) * _ratio_at(_logs(*sizes), self.by_kind[kind])

    def attention_s(self, job: Job, model: DecoderModel) -> tuple[float, float]:
        """Forward and backward attention of one block and micro-batch."""
        batch = job.layout.micro_batch or 1
        entry = AttentionTime(
            "fp32", batch, model.num_heads, model.num_kv_heads, model.head_size, job.data.seq_len, 1.0, 1.0
        )
        coordinates = _attention_coordinates(entry)
        return (
            self._count_attention(entry, 1.0) * _ratio_at(coordinates, self.forward),
            self._count_attention(entry, BACKWARD_FLOPS) * _ratio_at(coordinates, self.backward),
        )

    def _count_gemm(self, sizes: tuple[int, int, int]) -> float:
        rows, columns, depth = sizes
        share = 1.0
        if self.probed.multiprocessors:
            arrays = (np.array([float(size)]) for size in (rows, columns, depth, 1))
            # Libraries choose better tiles than those assumed, so that the last wave is fuller.
            share = math.sqrt(float(tile_share(self.probed.multiprocessors, *arrays)[0]))
        arithmetic = 2.0 * rows * columns * depth / (self.rate * share)
        moved = self.low * (rows * columns + depth * (rows + columns))
        return max(arithmetic, moved / self.probed.copy_bytes_per_s) + self.probed.launch_s

    def _count_attention(self, entry: AttentionTime, times: float) -> float:
        return times * _attention_flops(entry) / self.attention_rate + self.probed.launch_s

    def _compare_gemm(self, entry: GemmTime, kind: Kind) -> _Probe:
        sizes = _sizes(kind, entry.rows, entry.columns, entry.depth)
        return _Probe(_logs(*sizes), _time_of(entry, kind) / self._count_gemm(sizes))

    def _compare_attention(self, entry: AttentionTime, times: float, took_s: float) -> _Probe:
        return _Probe(_attention_coordinates(entry), took_s / self._count_attention(entry, times))


def fastest_gemm(probed: Probed) -> float:
    """Highest predicted GEMM rate: the fastest probed one, autotuned."""
    return max(_gemm_rate(entry, kind) for entry in probed.gemms for kind in KINDS) / AUTOTUNED_TIME


def _gemm_rate(entry: GemmTime, kind: Kind) -> float:
    return 2.0 * entry.rows * entry.columns * entry.depth / _time_of(entry, kind)


def _time_of(entry: GemmTime, kind: Kind) -> float:
    return {"forward": entry.forward_s, "input": entry.input_s, "weight": entry.weight_s}[kind]


def _sizes(kind: Kind, rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """M, N and K of one of the three GEMMs."""
    return {
        "forward": (rows, columns, depth),
        "input": (rows, depth, columns),
        "weight": (columns, depth, rows),
    }[kind]


def _attention_flops(entry: AttentionTime) -> float:
    """FLOPs of the forward pass: two matmuls, halved by the causal mask."""
    return 2.0 * entry.batch * entry.heads * entry.seq_len**2 * entry.head_size


def _attention_coordinates(entry: AttentionTime) -> tuple[float, ...]:
    length, size, heads = _logs(entry.seq_len, entry.head_size, entry.batch * entry.heads)
    return length, HEAD_SIZE_WEIGHT * size, HEADS_WEIGHT * heads


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log2(size) for size in sizes)


def _ratio_at(coordinates: tuple[float, ...], probes: Sequence[_Probe]) -> float:
    """Measured over estimated time, interpolated by inverse distance to the probed shapes."""
    weights = [1 / (NEARNESS + math.dist(coordinates, probe.coordinates) ** 2) ** 2 for probe in probes]
    total = sum(w * math.log(probe.ratio) for w, probe in zip(weights, probes, strict=True))
    return math.exp(total / sum(weights))


def _compiled_bytes(job: Job, model: DecoderModel, micro_batches: int) -> float:
    """Memory traffic of a compiled step besides GEMMs, attention and the update; each fused loop once."""
    low, residual = operand_bytes(job.train.precision), residual_bytes(job.train)
    rows = (job.layout.micro_batch or 1) * job.data.seq_len
    width, inner = model.hidden_size, model.ffn_size
    rotated = 2 * low * (model.query_size + model.kv_size) if model.positions == "rope" else 0
    gated = model.activation == "swiglu"
    rounded = (residual + low) * width if residual != low else 0  # cast of the residual gradient for GEMMs
    # A norm reads the residual and writes GEMM inputs; an addition reads both and writes the residual.
    norm, added = (residual + low) * width, (2 * residual + low) * width
    forward = 2 * norm + 2 * added - residual * width + rotated + (3 if gated else 2) * low * inner
    # The norm's backward reads its output gradient, its input and the residual gradient; the weight gradient
    # reads the first two again.
    norm_back = (2 * low + 4 * residual) * width
    backward = 2 * (norm_back + rounded) + rotated + (5 if gated else 3) * low * inner
    recompute_bytes = {"none": 0.0, "selective": 2.0 * norm + rotated + low * inner, "full": float(forward)}
    block = rows * (forward + backward + recompute_bytes[job.layout.recompute])
    # Embedding rows, final norm, logits read twice and written once.
    table, vocab = model.vocab_size * width * FLOAT32_BYTES, model.vocab_size
    ends = rows * (3 * FLOAT32_BYTES * width + 2 * residual * width + norm + norm_back + 3 * low * vocab)
    chunks = math.ceil(rows / loss_chunk(job, model))
    ends += table + 2 * table * chunks  # zeroing the embedding gradient; accumulating the head's
    total = micro_batches * (model.num_layers * block + ends)
    parameters = count_parameters(model)
    if low != FLOAT32_BYTES and not uses_bf16_weight_copies(
        job
    ):  # weights cast in both passes, gradients cast back
        total += micro_batches * 18 * (parameters - model.vocab_size * width)
    total += (micro_batches - 1) * 3 * FLOAT32_BYTES * parameters
    return total + FLOAT32_BYTES * parameters  # read once for the gradient norm


def _update_s(job: Job, model: DecoderModel, probed: Probed) -> float:
    """The optimizer step over all parameters; the caller divides by the ZeRO shards."""
    cost = predict_optimizer(with_gradients(job, list_parameters(model)), job.train)
    written = 0
    if uses_bf16_weight_copies(job):  # bf16 weight copies
        written = operand_bytes(job.train.precision) * count_parameters(model)
    rate = _ProbedTimes.of(probed, _precision(job)).rate
    return (cost.moved_bytes + written) / probed.optimizer_bytes_per_s + cost.flops / rate


def fit_steps(probed: Probed, timed: Sequence[MeasuredStep]) -> Probed:
    """Fit the elementwise factor and step overhead to real steps; on a CPU also launch time and passes.

    Least squares of relative errors, without negative values. Triton blocks have a measured elementwise
    factor.

    Args:
        probed: With the times of single operations; on a GPU also with the CPU launch time.
        timed: Measured steps, at least one.
    """
    works = [count_work(with_probed(t.job, probed), t.micro_batches, t.touched_bytes) for t in timed]
    scales = np.array([1 / t.step_s for t in timed])
    known = [w.gemm_s + w.attention_s + w.update_s for w in works]
    known = [
        s + w.moved_s * probed.triton_elementwise if w.uses_triton else s
        for s, w in zip(known, works, strict=True)
    ]
    left = np.array([t.step_s - s for t, s in zip(timed, known, strict=True)])
    columns: dict[str, list[float]] = {"step_s": [1.0] * len(timed)}
    if not all(w.uses_triton for w in works):
        columns["elementwise"] = [0.0 if w.uses_triton else w.moved_s for w in works]
    if not works[0].hides_cpu_launch:
        columns["block_s"] = [float(w.blocks) for w in works]
        columns["parameter_passes"] = [w.parameters_s for w in works]
    table = {name: np.array(values) * scales for name, values in columns.items()}
    found = _least_squares(table, left * scales)
    if "elementwise" in columns:
        found["elementwise"] = max(found.get("elementwise", 0.0), LEAST_ELEMENTWISE)
    rounded: dict[str, Any] = {name: float(f"{value:.4g}") for name, value in found.items()}
    return dataclasses.replace(probed, **rounded)


def _least_squares(columns: dict[str, np.ndarray], targets: np.ndarray) -> dict[str, float]:
    """Non-negative least squares by trying all subsets of the few columns."""

    def solve(names: Sequence[str]) -> tuple[float, dict[str, float]]:
        matrix = np.stack([columns[name] for name in names], axis=1)
        factors = np.linalg.lstsq(matrix, targets, rcond=None)[0]
        miss = float(((matrix @ factors - targets) ** 2).sum()) if (factors >= 0).all() else math.inf
        return miss, dict(zip(names, map(float, factors), strict=True))

    counts = range(1, len(columns) + 1)
    choices = [names for count in counts for names in itertools.combinations(columns, count)]
    best = min((solve(names) for names in choices if len(names) <= len(targets)), key=lambda found: found[0])
    return best[1] if math.isfinite(best[0]) else {}
