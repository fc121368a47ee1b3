"""The timings of ``meshwright probe`` on one device: single operations as a run calls them, and real steps.

Operands are random: the speed of a GPU depends on the values and on its temperature. So each operation is
repeated for a while. On a GPU the mean counts, not the best. On a CPU the lower quartile of CPU time counts:
about the time of one thread on an idle core.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.core.events import EventWriter
from meshwright.launch.assignment import Assignment
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.measure.elapsed import count_calls, elapsed_s
from meshwright.models.attention import causal_attention, prefer_fast_attention
from meshwright.models.decoder import Decoder
from meshwright.models.dtypes import AUTOCAST_DTYPES, RESIDUAL_DTYPES
from meshwright.models.kernels import fused as kernels
from meshwright.models.linear import weight_grad
from meshwright.models.rope import build_rope
from meshwright.models.triton_block import LinearGemms
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.plan.contract import PlanContract
from meshwright.spec.execution import uses_bf16_weight_copies, uses_fused_adamw
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.train.build import build_trainer
from meshwright.train.cpu_memory import keep_freed_memory
from meshwright.train.loop import run_step, start_meter
from meshwright.train.optimizer import build_optimizer
from meshwright.train.rank_context import RankContext
from meshwright.train.trainer import Trainer
from meshwright.verify.synthetic_data import RandomTokens

MIN_CALLS = 3
"""Calls of an operation, even if they take longer."""
MAX_CALLS = 1000
WARM_UP = 2
WARM_UP_STEPS = 3
ADAMW_BYTES = 28
"""Memory traffic of AdamW per float32 element: weight, gradient and two moments read; all but the gradient
written. A 16-bit weight copy adds two bytes."""
UPDATED_ROWS = 64


class Timer(Protocol):
    """Repeats a call for a while and returns the time of one."""

    def time(self, call: Callable[[], object]) -> float:
        """Time of one call."""
        ...


@dataclass(frozen=True)
class GpuTimer:
    """Repeats a call for some seconds; the mean counts."""

    device: torch.device
    seconds: float

    def time(self, call: Callable[[], object]) -> float:
        """Time of one call."""
        warm_up(call)
        torch.cuda.synchronize(self.device)
        one_s = elapsed_s(call, MIN_CALLS)
        return elapsed_s(call, min(MAX_CALLS, count_calls(self.seconds, one_s, MIN_CALLS)))


@dataclass(frozen=True)
class CpuTimer:
    """Repeats a call for some seconds; the lower quartile of CPU time counts.

    Other processes make calls slower, never faster.
    """

    seconds: float

    def time(self, call: Callable[[], object]) -> float:
        """Time of one call."""
        warm_up(call)
        return statistics.quantiles(list_cpu_times(call, self.seconds), n=4)[0]


def build_timer(device: torch.device, seconds: float) -> Timer:
    """The timer of a device that measures alone."""
    return GpuTimer(device, seconds) if device.type == "cuda" else CpuTimer(seconds)


def warm_up(call: Callable[[], object]) -> None:
    """Call it a few times."""
    for _ in range(WARM_UP):
        call()


def list_cpu_times(call: Callable[[], object], seconds: float) -> list[float]:
    """CPU time of each of the calls that fit into some seconds."""
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < MIN_CALLS or (time.perf_counter() < deadline and len(times) < MAX_CALLS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return times


def time_linear(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int], timer: Timer
) -> tuple[float, float, float]:
    """The three GEMMs of a linear layer: output, input gradient, and weight gradient in float32.

    Args:
        device: Device of the operands.
        dtype: Dtype of the operands.
        sizes: Rows, output features, input features.
        timer: Times each of the three.
    """
    rows, columns, depth = sizes
    x = torch.randn(rows, depth, device=device).to(dtype)
    grad = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.randn(columns, depth, device=device).mul_(depth**-0.5).to(dtype)
    exact = weight_grad if dtype != torch.float32 else lambda grad, x: torch.mm(grad.T, x)
    return (
        timer.time(lambda: torch.mm(x, weight.T)),
        timer.time(lambda: torch.mm(grad, weight)),
        timer.time(lambda: exact(grad, x)),
    )


def time_fp8_linear(
    device: torch.device, sizes: tuple[int, int, int], timer: Timer
) -> tuple[float, float, float]:
    """The same in fp8, with the casts of a step; the input of the forward GEMM is cast already.

    Args:
        device: Device of the operands.
        sizes: Rows, output features, input features.
        timer: Times each of the three.
    """
    rows, columns, depth = sizes
    x = torch.randn(rows, depth, device=device).bfloat16()
    grad = torch.randn(rows, columns, device=device).bfloat16()
    weight = torch.randn(columns, depth, device=device).mul_(depth**-0.5).bfloat16()
    gemms = LinearGemms(weight, uses_fp8=True, uses_fp8_weight_grad=True, rows=(columns,))
    cast = kernels.cast_rows(x)
    return (
        timer.time(lambda: gemms.forward(cast)),
        timer.time(lambda: gemms.input_grad(grad)),
        timer.time(lambda: gemms.weight_grads(grad, x)),
    )


def time_triton_kernels(device: torch.device, job: Job, timer: Timer) -> float:
    """Time of the Triton kernels in both passes of a block, with selective activation checkpointing."""
    model, batch, length = job.model, job.layout.micro_batch or 1, job.data.seq_len
    assert isinstance(model, DecoderModel), "only decoders are probed"
    width, low, residual = model.hidden_size, torch.bfloat16, RESIDUAL_DTYPES[job.train.residual_dtype]
    parts = (model.num_heads, model.num_kv_heads, model.num_kv_heads)

    def draw(*shape: int, dtype: torch.dtype = low) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    tokens = batch * length
    x, delta, weight = draw(tokens, width, dtype=residual), draw(tokens, width), draw(width)
    both, grad = draw(tokens, 2 * model.ffn_size), draw(tokens, model.ffn_size)
    heads = draw(batch, length, sum(parts), model.head_size).transpose(1, 2)
    q, k, v = heads.clone().split(parts, dim=1)
    rope = build_rope(model, torch.arange(length, device=device))

    def run() -> None:
        for _ in range(2):
            total, _, inverse = kernels.add_rms_norm(x, delta, weight, model.norm_eps, low)
        kernels.rotate_heads(heads[:, : parts[0] + parts[1]], *rope)
        kernels.swiglu(both, low)
        kernels.swiglu_backward(both, grad)
        for _ in range(2):
            kernels.rms_norm_backward(delta, total, inverse, weight, x)
        kernels.rope_backward(q, k, v, *rope)

    return timer.time(run)


def time_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    sequences: tuple[int, int],
    timer: Timer,
) -> tuple[float, float]:
    """Causal attention as a block calls it: the forward pass, and the backward pass.

    Args:
        device: Device of the operands.
        dtype: Dtype of queries, keys and values.
        heads: Query heads, key heads, head size.
        sequences: Batch size, sequence length.
        timer: Times each of the two.
    """
    num_heads, num_kv_heads, size = heads
    batch, length = sequences

    def draw(count: int) -> Tensor:
        drawn = torch.randn(batch, length, count, size, device=device).to(dtype)
        return drawn.transpose(1, 2).requires_grad_()

    q, k, v = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)
    grad = torch.randn(batch, length, num_heads, size, device=device).to(dtype).transpose(1, 2)

    def both() -> object:
        return torch.autograd.grad(causal_attention(q, k, v, None), (q, k, v), grad)

    with prefer_fast_attention(device.type):
        with torch.no_grad():
            forward_s = timer.time(lambda: causal_attention(q, k, v, None))
        return forward_s, max(timer.time(both) - forward_s, 0.1 * forward_s)


def measure_copy(device: torch.device, elements: int, timer: Timer) -> float:
    """Bandwidth of a copy of float32 elements; read and written bytes both count."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 2 * 4 * elements / timer.time(lambda: target.copy_(source))


def measure_adamw(device: torch.device, job: Job, elements: int, timer: Timer) -> float:
    """Bandwidth of the AdamW of a job on one matrix; read and written bytes both count."""
    linear = torch.nn.Linear(elements // UPDATED_ROWS, UPDATED_ROWS, bias=False, device=device)
    (weight,) = linear.parameters()
    weight.grad = torch.randn_like(weight)
    low = AUTOCAST_DTYPES.get(job.train.precision)
    copies = {} if low is None or not uses_bf16_weight_copies(job) else {weight: weight.detach().to(low)}
    optimizer = build_optimizer(linear, job.train, copies, uses_fused_adamw(job))
    each = ADAMW_BYTES + sum(copy.element_size() for copy in copies.values())
    return each * elements / timer.time(optimizer.step)


def measure_launch(device: torch.device, timer: Timer) -> float:
    """Time of an operation on one element: the launch overhead."""
    one = torch.zeros(1, device=device)
    return timer.time(lambda: one.add_(1.0))


def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@dataclass(frozen=True)
class StepTimings:
    """Times of a few steps of a small model."""

    step_s: float
    """Median on a GPU; on a CPU the lower quartile of CPU time, or its median if all cores run the steps."""
    peak_bytes: int | None
    """Peak of allocated memory in a step; None on a CPU."""
    block_s: float | None
    """CPU launch time of both passes of a block on a GPU; None on a CPU."""


def time_steps(plan: PlanContract, align: Callable[[], None] | None = None) -> StepTimings:
    """Run ``train.steps`` steps of a one-process plan in this process; the first three are warm-up.

    Args:
        plan: Plan of a small model.
        align: Called after the warm-up on a core of several that run the same steps: waits for the others.
    """
    if plan.job.cluster.device == "cpu":
        keep_freed_memory()
    try:
        return _time_steps(plan, align)
    finally:
        _release_memory()


def _time_steps(plan: PlanContract, align: Callable[[], None] | None) -> StepTimings:
    counter, events = CollectiveCounter(), EventWriter(Path(os.devnull), 0, 0)
    assignment = Assignment(os.devnull, os.devnull, os.devnull)
    mesh = init_mesh(plan.job, counter, rank=0)
    try:
        dataset = RandomTokens(plan.job)
        context = RankContext(plan, assignment, mesh, counter, events)
        trainer = build_trainer(context, open_split=lambda _: dataset)
        meter, times, device = start_meter(trainer), [], mesh.device
        on_gpu = device.type == "cuda"
        clock = time.perf_counter if on_gpu else time.process_time
        for number in range(plan.job.train.steps):
            if number == WARM_UP_STEPS and on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
            if number == WARM_UP_STEPS and align is not None:
                align()
            started = clock()
            run_step(trainer, meter, audited=False)
            _wait(device)
            times.append(clock() - started)
        counted = times[WARM_UP_STEPS:]
        if not on_gpu and align is None:  # other processes make steps slower, never faster
            return StepTimings(statistics.quantiles(counted, n=4)[0], None, None)
        step_s = statistics.median(counted)
        if not on_gpu:
            return StepTimings(step_s, None, None)
        return StepTimings(step_s, torch.cuda.max_memory_allocated(device), time_block_launch(trainer))
    finally:
        destroy_mesh(mesh)
        events.close()


def time_block_launch(trainer: Trainer) -> float:
    """CPU time to launch both passes of one block, averaged over all blocks."""
    model, device, job = trainer.model, trainer.mesh.device, trainer.job
    assert isinstance(model, Decoder), "only decoders are probed"
    blocks, length = list(model.list_blocks()), job.data.seq_len
    shape = (job.layout.micro_batch or 1, length, blocks[0].attention.wo.out_features)
    x = torch.randn(shape, device=device).to(model.residual_dtype).requires_grad_()
    rope, times = (model.rope_cos[:length], model.rope_sin[:length]), []
    for _ in range(WARM_UP + 5):
        trainer.rank_parameters.zero_grads()  # they would accumulate
        x.grad = None  # likewise
        _wait(device)
        started = time.perf_counter()
        with trainer.amp.autocast():
            out: Any = x
            for block in blocks:
                out = block(out, rope, None, None)
        outputs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:]) / len(blocks)


def _wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release_memory() -> None:
    """Free the memory of the steps for the next ones."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
