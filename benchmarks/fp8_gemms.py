"""Speed-up of fp8: each GEMM of a block in bf16 and in fp8, with compiled casts.

Each linear layer has three GEMMs: forward, input gradient, weight gradient. In bf16 they read their
operands as they are; in fp8 compiled code casts them first, like ``models.kernels.fp8``. In a real block a
cast is fused with the norm or activation before it, so the fp8 times here are an upper bound.
``alone`` is the fp8 GEMM without casts, with fast accumulation and with float32 accumulation (exact). The
shape is that of a 3.2B model (3072 wide, 24 heads, 8 key heads, ffn 8192) with 4 x 4096 tokens.

The largest GEMMs come first; none is started after ``--budget`` seconds.

    python benchmarks/fp8_gemms.py
    python benchmarks/fp8_gemms.py --small
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor

from meshwright.models.kernels import fp8
from meshwright.models.linear import weight_grad

GEMMS = {"gate, up": (16384, 3072), "down": (3072, 8192), "q, k, v": (5120, 3072), "out": (3072, 3072)}
"""Outputs and inputs of a block's linear layers."""
TOKENS, LAYERS = 4 * 4096, 28
WARM_UPS, REPEATS = 3, 10


@dataclass(frozen=True)
class Figure:
    """One of the three GEMMs of a linear layer."""

    gemm: str
    which: str
    """``forward``, ``input`` (input gradient) or ``weight`` (weight gradient)."""
    flops: float
    bf16_s: float
    fp8_s: float
    """With casts."""
    fast_s: float
    """Without casts."""
    exact_s: float
    """Without casts, with float32 accumulation."""


def measure(run: Callable[[], object], on_gpu: bool) -> float:
    """Median time of a call."""
    for _ in range(WARM_UPS):
        run()
    spent = []
    if not on_gpu:
        for _ in range(REPEATS):
            started = time.perf_counter()
            run()
            spent.append(time.perf_counter() - started)
        return statistics.median(spent)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    spent = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return statistics.median(spent)


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """An fp8 GEMM of bf16 tensors."""
    return fp8.forward(fp8.cast_rows(x), fp8.cast_rows(weight))


def fp8_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The input gradient in fp8."""
    cast = fp8.cast_rows(weight)
    return fp8.input_grad(fp8.cast_rows(grad, by=cast.scale), fp8.transpose(cast.values))


def fp8_weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The weight gradient in fp8, with a float32 output for the optimizer."""
    cast = fp8.cast_rows(x)
    grad_ON = fp8.cast_columns(grad.float() * cast.scale)  # noqa: N806
    return fp8.weight_grad(grad_ON, fp8.GemmOperand(fp8.transpose(cast.values)))


def measure_alone(rows: int, columns: int, depth: int, device: torch.device) -> list[float]:
    """Seconds of an fp8 GEMM without casts: fast, then exact accumulation."""
    a = torch.randn(rows, depth, device=device).to(fp8.E4M3)
    b = torch.randn(columns, depth, device=device).to(fp8.E4M3).t()
    scales = torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device)

    def run(fast: bool) -> Tensor:
        return torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return [measure(lambda fast=fast: run(fast), device.type == "cuda") for fast in (True, False)]


def measure_gemm(name: str, outputs: int, inputs: int, tokens: int, device: torch.device) -> list[Figure]:
    """The three GEMMs of a linear layer."""
    x = torch.randn(tokens, inputs, device=device).bfloat16()
    grad = (torch.randn(tokens, outputs, device=device) * 1e-6).bfloat16()
    weight = (torch.randn(outputs, inputs, device=device) * 0.02).bfloat16()
    on_gpu = device.type == "cuda"
    passes: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, Tensor]]] = {
        "forward": (F.linear, forward, (x, weight)),
        "input": (torch.mm, fp8_input_grad, (grad, weight)),
        "weight": (weight_grad, fp8_weight_grad, (grad, x)),
    }
    sizes = {
        "forward": (tokens, outputs, inputs),
        "input": (tokens, inputs, outputs),
        "weight": (outputs, inputs, tokens),
    }
    found = []
    for which, (in_16, in_8, operands) in passes.items():
        compiled = torch.compile(in_8, dynamic=False)
        figures = [
            measure(lambda run=run, operands=operands: run(*operands), on_gpu) for run in (in_16, compiled)
        ]
        alone = measure_alone(*sizes[which], device)
        found.append(Figure(name, which, 2.0 * tokens * outputs * inputs, *figures, *alone))
        show(found[-1])
    return found


def show(figure: Figure) -> None:
    """One row as text."""
    rates = [figure.flops / s / 1e12 for s in (figure.bf16_s, figure.fp8_s, figure.fast_s, figure.exact_s)]
    print(
        f"{figure.gemm:<9} {figure.which:<8} {figure.bf16_s * 1e3:8.3f} {figure.fp8_s * 1e3:8.3f} "
        f"{figure.bf16_s / figure.fp8_s:6.2f} {rates[0]:9.1f} {rates[1]:8.1f} {rates[2]:10.1f} "
        f"{rates[3]:8.1f}",
        flush=True,
    )


def print_totals(figures: list[Figure]) -> None:
    """Speed-up of a step, in all layers, with two of the three GEMMs in fp8 and with all."""
    bf16_s = sum(figure.bf16_s for figure in figures)
    two_s = sum(figure.bf16_s if figure.which == "weight" else figure.fp8_s for figure in figures)
    all_s = sum(figure.fp8_s for figure in figures)
    for name, spent in (("bf16", bf16_s), ("fp8, weight gradients in bf16", two_s), ("fp8", all_s)):
        print(f"{LAYERS} layers, {name}: {spent * LAYERS * 1e3:.1f} ms, {bf16_s / spent:.2f}x")


def main() -> None:
    """Measure with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds after which no GEMM is started")
    parser.add_argument("--json", action="store_true", help="also print the figures as one line of JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.small else "cpu")
    scale, tokens = (32, 64) if options.small else (1, TOKENS)
    print(f"torch {torch.__version__}, {device.type}, {tokens} tokens")
    print("GEMM      pass      bf16 ms   fp8 ms  ratio  bf16 TF/s fp8 TF/s alone fast    exact")
    started, figures = time.perf_counter(), list[Figure]()
    for name, (outputs, inputs) in GEMMS.items():
        if time.perf_counter() - started > options.budget:
            print(f"not measured: {name} and later GEMMs, as {options.budget:g} s have passed")
            break
        figures += measure_gemm(name, outputs // scale, inputs // scale, tokens, device)
    print_totals(figures)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main()
