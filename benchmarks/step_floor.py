"""The floor of a training step on one device: the sum of its parts, each timed alone.

The parts are work that every implementation must do: every GEMM (forward, input gradient, weight gradient;
q, k, v in one, gate and up in one, the head in one), attention forward and backward, the optimizer step, and
the bytes that elementwise work must read and write once, at the bandwidth of a large copy. There is no
recomputation and no idle time.

That is the floor at full clock. Under sustained load a GPU reaches its power limit and lowers its clock: an
H200 with 700 W to 1.5 of 1.98 GHz. So on GPUs, GEMMs and attention are timed again under sustained load.

The counts (``list_gemms``, ``elementwise_bytes``) need no torch; ``time_floor`` does.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.layout.parameters import list_parameters
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOW_BYTES, FLOAT32_BYTES = 2, 4
WARM_UP, REPEATS = 2, 10
SUSTAINED_S = 0.4
"""Seconds that an operation runs for its sustained time; the second half counts."""
COPY = "copy of 0.5 TB, read and written"


@dataclass(frozen=True)
class Gemm:
    """A GEMM of ``tokens`` rows with a weight, with its count in the model."""

    name: str
    inner: int
    outer: int
    times: int

    def flops(self, tokens: int) -> float:
        """FLOPs of its three GEMMs, over all occurrences."""
        return 3 * 2.0 * tokens * self.inner * self.outer * self.times


def list_gemms(model: DecoderModel) -> list[Gemm]:
    """The GEMMs of a step; projections that share an input are one."""
    width, layers = model.hidden_size, model.num_layers
    return [
        Gemm("q, k, v", width, model.query_size + 2 * model.kv_size, layers),
        Gemm("attention out", model.query_size, width, layers),
        Gemm("gate, up", width, 2 * model.ffn_size, layers),
        Gemm("down", model.ffn_size, width, layers),
        Gemm("head", width, model.vocab_size, 1),
    ]


def elementwise_bytes(model: DecoderModel, tokens: int) -> dict[str, float]:
    """Bytes that elementwise work must move, with 16-bit tensors.

    Residual addition and norm read two tensors and write two; backward they read three and write one. RoPE
    reads and writes queries and keys in both directions. The gate reads two and writes one; backward it
    reads three and writes two. The loss reads the logits twice and writes their gradient once. The
    embedding reads float32 rows and writes 16 bits; backward the reverse.
    """
    residual = float(tokens * model.hidden_size * LOW_BYTES)
    rotated = float(tokens * (model.query_size + model.kv_size) * LOW_BYTES)
    hidden = float(tokens * model.ffn_size * LOW_BYTES)
    return {
        "residuals and norms": 8 * residual * (2 * model.num_layers + 1),
        "RoPE": 4 * rotated * model.num_layers,
        "SwiGLU": 8 * hidden * model.num_layers,
        "loss": 3.0 * tokens * model.vocab_size * LOW_BYTES,
        "embedding": 2.0 * tokens * model.hidden_size * (LOW_BYTES + FLOAT32_BYTES),
    }


def attention_flops(model: DecoderModel, tokens: int, length: int) -> float:
    """Forward and backward of all layers, causal (half): 2 for scores, 2 for values, times 3."""
    return 3 * 4.0 * tokens * length / 2 * model.query_size * model.num_layers


class Timer:
    """Medians of repeated calls: CUDA events on a GPU, the clock on a CPU."""

    def __init__(self, device: str) -> None:
        import torch  # noqa: PLC0415

        self._events = torch.cuda.Event if device == "cuda" else None
        self._wait = torch.cuda.synchronize

    def median_s(self, work: Callable[[], Any]) -> float:
        """Seconds of one call."""
        for _ in range(WARM_UP):
            work()
        if self._events is None:
            times = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                work()
                times.append(time.perf_counter() - started)
            return statistics.median(times)
        marks = [self._events(enable_timing=True) for _ in range(REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self._wait()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))


class SustainedTimer(Timer):
    """Sustained load on a GPU: the mean of calls once the clock has dropped."""

    def median_s(self, work: Callable[[], Any]) -> float:
        """Seconds of one call."""
        half = max(1, round(SUSTAINED_S / 2 / super().median_s(work)))
        begin, end = self._events(enable_timing=True), self._events(enable_timing=True)
        for _ in range(half):
            work()
        begin.record()
        for _ in range(half):
            work()
        end.record()
        self._wait()
        return begin.elapsed_time(end) / 1e3 / half


def time_floor(job: Job, report: Callable[..., None]) -> dict[str, Any]:
    """Time every part; a part that fails is reported and does not stop the others.

    Args:
        job: Gives model, batch and device.
        report: Gets each part after its measurement.
    """
    tokens = job.train.global_batch * job.data.seq_len
    timer = Timer(job.cluster.device)
    parts: dict[str, float] = {}
    shown: dict[str, float] = {}
    failed: dict[str, str] = {}
    flops = sum(gemm.flops(tokens) for gemm in list_gemms(job.model))

    def attempt(name: str, work: Callable[[], tuple[dict[str, float], dict[str, float]]]) -> None:
        started = time.perf_counter()
        try:
            counted, extra = work()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            report(phase=name, failed=failed[name])
            return
        parts.update(counted)
        shown.update(extra)
        report(phase=name, seconds=time.perf_counter() - started, parts=counted, shown=extra)

    attempt("GEMMs", lambda: _time_gemms(job, tokens, timer))
    attempt("attention", lambda: (_time_attention(job, timer), {}))
    attempt("optimizer", lambda: _time_optimizer(job, timer))
    attempt("elementwise", lambda: _time_elementwise(job, tokens, timer))
    complete, sustained = not failed, dict[str, float]()
    if job.cluster.device == "cuda":  # a CPU GEMM has no float32 output for bf16 inputs
        attempt("float32 weight gradients", lambda: _time_exact_gemms(job, tokens, timer))
        attempt("flash attention", lambda: ({}, _time_attention(job, timer, flash=True)))
        if complete:
            attempt("sustained load", lambda: ({}, sustained.update(_time_sustained(job, tokens)) or {}))
    gemm_s, sustained_gemm_s = (
        sum(seconds for name, seconds in times.items() if name.startswith("GEMM "))
        for times in (parts, sustained)
    )
    attention_s = sum(seconds for name, seconds in parts.items() if name.startswith("attention,"))
    return {
        "step_s": sum(parts.values()) if complete else None,
        "sustained_step_s": sum((parts | sustained).values()) if sustained else None,
        "sustained_gemm_flops_per_s": flops / sustained_gemm_s if sustained_gemm_s else None,
        "parts_s": parts,
        "shown_s": shown,
        "failed_parts": failed,
        "gemm_flops_per_s": flops / gemm_s if gemm_s else None,
        "attention_flops_per_s": attention_flops(job.model, tokens, job.data.seq_len) / attention_s
        if attention_s
        else None,
        "copy_bytes_per_s": 1e12 / shown[COPY] if COPY in shown else None,
    }


def _time_sustained(job: Job, tokens: int) -> dict[str, float]:
    """GEMMs and attention of a GPU under sustained load."""
    timer = SustainedTimer(job.cluster.device)
    _time_gemms(job, tokens, Timer(job.cluster.device))  # lowers the clock before the first measurement
    return _time_gemms(job, tokens, timer)[0] | _time_attention(job, timer)


FloorTimes = tuple[dict[str, float], dict[str, float]]
"""Seconds of a step by part: those that count, and those that are only shown."""


def _time_gemms(job: Job, tokens: int, timer: Timer) -> FloorTimes:
    """Forward, input gradient, weight gradient."""
    import torch  # noqa: PLC0415

    device = job.cluster.device
    counted = {}
    for gemm in list_gemms(job.model):
        x = torch.randn(tokens, gemm.inner, device=device, dtype=torch.bfloat16)
        weight = torch.randn(gemm.outer, gemm.inner, device=device, dtype=torch.bfloat16) * 0.02
        grad = torch.randn(tokens, gemm.outer, device=device, dtype=torch.bfloat16)
        out, grad_x, grad_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
        for name, work in (
            ("forward", lambda a=x, b=weight, c=out: torch.mm(a, b.T, out=c)),
            ("input", lambda a=grad, b=weight, c=grad_x: torch.mm(a, b, out=c)),
            ("weight", lambda a=grad, b=x, c=grad_weight: torch.mm(a.T, b, out=c)),
        ):
            counted[f"GEMM {gemm.name}, {name}"] = timer.median_s(work) * gemm.times
        del x, weight, grad, out, grad_x, grad_weight
    return counted, {}


def _time_exact_gemms(job: Job, tokens: int, timer: Timer) -> FloorTimes:
    """Weight gradients with a float32 output of the GEMM; shown only."""
    import torch  # noqa: PLC0415

    shown = {}
    for gemm in list_gemms(job.model):
        x = torch.randn(tokens, gemm.inner, device=job.cluster.device, dtype=torch.bfloat16)
        grad = torch.randn(tokens, gemm.outer, device=job.cluster.device, dtype=torch.bfloat16)
        taken_s = timer.median_s(lambda a=grad, b=x: torch.mm(a.T, b, out_dtype=torch.float32))
        shown[f"GEMM {gemm.name}, weight in float32"] = taken_s * gemm.times
        del x, grad
    return {}, shown


def _time_attention(job: Job, timer: Timer, flash: bool = False) -> dict[str, float]:
    """Attention forward and backward of all layers, with heads in the memory layout of the GEMM outputs.

    Args:
        job: Gives model and batch.
        timer: Measures the time.
        flash: Use flash attention instead of cuDNN; equal times mean that cuDNN fell back.
    """
    import torch  # noqa: PLC0415
    import torch.nn.functional as F  # noqa: N812, PLC0415
    from torch.nn.attention import SDPBackend  # noqa: PLC0415
    from torch_llama import fast_attention  # noqa: PLC0415

    model, device = job.model, job.cluster.device
    batch, length = job.train.global_batch, job.data.seq_len

    def heads(count: int) -> torch.Tensor:
        shape = (batch, length, count, model.head_size)
        drawn = torch.randn(shape, device=device, dtype=torch.bfloat16)
        return drawn.transpose(1, 2).requires_grad_()

    q, k, v = heads(model.num_heads), heads(model.num_kv_heads), heads(model.num_kv_heads)
    grouped = model.num_heads != model.num_kv_heads

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    with fast_attention(device, SDPBackend.FLASH_ATTENTION if flash else SDPBackend.CUDNN_ATTENTION):
        out = attend()
        gradient = torch.randn_like(out)
        forward_s = timer.median_s(attend)
        backward_s = timer.median_s(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    name, layers = "flash attention" if flash else "attention", model.num_layers
    return {f"{name}, forward": forward_s * layers, f"{name}, backward": backward_s * layers}


def _time_optimizer(job: Job, timer: Timer) -> FloorTimes:
    """Torch's fused AdamW on float32 weights of the model's shapes; the gradient norm is shown only."""
    import torch  # noqa: PLC0415

    device = job.cluster.device
    parameters = [torch.randn(p.shape, device=device).mul_(0.02) for p in list_parameters(job.model)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm_s = timer.median_s(lambda: torch.nn.utils.get_total_norm(gradients, foreach=True))
    return {"optimizer": timer.median_s(optimizer.step)}, {"gradient norm": norm_s}


def _time_elementwise(job: Job, tokens: int, timer: Timer) -> FloorTimes:
    """Counted bytes over the bandwidth of a copy that does not fit the cache."""
    import torch  # noqa: PLC0415

    device = job.cluster.device
    source = torch.randn(2**30 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    copy_s = timer.median_s(lambda: target.copy_(source))
    bytes_per_s = 2 * source.numel() * FLOAT32_BYTES / copy_s
    counted = elementwise_bytes(job.model, tokens)
    return {f"elementwise, {name}": moved / bytes_per_s for name, moved in counted.items()}, {
        COPY: 1e12 / bytes_per_s
    }
