"""Times kernel classes over shapes on one GPU, for the efficiency curves of the time model.

GEMMs (bf16 and fp8, forward, input gradient, weight gradient), fused attention by head size and length,
grouped GEMMs by expert shape and tokens per expert, element-wise kernels by bytes, copies from and to the
CPU, and a CPU Adam step. Plain torch; CUDA events; ends within about 100 s, whatever is left undone.

    python benchmarks/kernel_curves.py curves.json
"""
# ruff: noqa: B023 (each work is timed before its loop goes on)

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LIMIT_S = 100.0
"""No measurement starts after this."""
LEAST_S = 0.012
"""Least time of one measurement."""
ROUNDS = 3
SUSTAINED_S = 2.5
FP8 = torch.float8_e4m3fn
Row = dict[str, Any]

LINEARS = (
    (2048, 2048), (3072, 2048), (16384, 2048), (2048, 8192), (4096, 4096), (6144, 4096), (28672, 4096),
    (4096, 14336), (1600, 1600), (4800, 1600), (6400, 1600), (1600, 6400), (8192, 1024), (1280, 8192),
    (7168, 8192), (8192, 3584), (1024, 4096), (4096, 512), (57344, 8192), (8192, 28672), (128256, 2048),
    (50304, 1600), (4096, 7168), (1536, 7168), (24576, 1536), (2048, 7168),
)  # fmt: skip
"""Columns and depth of linear layers, whole and split over tp."""
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
EXPERTS = (
    (16, 2048, 2048), (64, 2048, 1408), (8, 4096, 14336), (8, 6144, 16384), (32, 7168, 2048),
    (128, 2048, 768), (8, 7168, 2048), (32, 2880, 2880), (2, 6144, 32768),
)  # fmt: skip
"""Local experts, hidden width and expert width."""
EXPERT_TOKENS = (32, 128, 512, 2048, 8192)
HEADS = ((64, 32, 8), (128, 16, 4), (128, 32, 32), (96, 16, 16), (256, 8, 8), (80, 16, 16))
"""Head size, query heads, key heads."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
ATTENTION_TOKENS = 32768
MOST_ELEMENTS = 2**31
BYTES = (2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)


class Curves:
    """The rows measured so far, and the deadline."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.rows: list[Row] = []

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def add(self, row: Row, work: Callable[[], Any]) -> None:
        """Time one kernel; a failure becomes the row's error."""
        if self.spent_s > LIMIT_S:
            return
        try:
            row["seconds"] = time_s(work)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            row["error"] = str(error).splitlines()[0][:200]
            torch.cuda.empty_cache()
        self.rows.append(row)


def time_s(work: Callable[[], Any]) -> float:
    """Seconds of one call: median of rounds, each at least LEAST_S long on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(calls: int) -> float:
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    work()
    one = run(2)
    calls = max(2, min(500, int(LEAST_S / max(one, 1e-6))))
    return sorted(run(calls) for _ in range(ROUNDS))[ROUNDS // 2]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random values on the GPU, scaled like activations."""
    made = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.05)
    return made if dtype is torch.bfloat16 else made.to(dtype)


def gemms(curves: Curves) -> None:
    """The three GEMMs of linear layers in bf16."""
    for columns, depth in LINEARS:
        weight = tensor(columns, depth)
        for rows in TOKENS:
            if rows * max(columns, depth) > MOST_ELEMENTS:
                continue
            given, grad = tensor(rows, depth), tensor(rows, columns)
            shape = {"rows": rows, "columns": columns, "depth": depth}
            curves.add({"class": "gemm", "pass": "forward", **shape}, lambda: given @ weight.t())
            if rows in (512, 4096, 16384):
                curves.add({"class": "gemm", "pass": "input", **shape}, lambda: grad @ weight)
                curves.add({"class": "gemm", "pass": "weight", **shape}, lambda: grad.t() @ given)
                into = torch.empty(columns, depth, device="cuda", dtype=torch.float32)
                curves.add(
                    {"class": "gemm", "pass": "weight-float32", **shape},
                    lambda: torch.mm(grad.t(), given, out_dtype=torch.float32, out=into),
                )


def fp8_gemms(curves: Curves) -> None:
    """fp8 GEMMs with tensor and row scales, and the cast."""
    for columns, depth in LINEARS:
        if columns % 16 or depth % 16 or columns > 100_000:
            continue
        weight = tensor(columns, depth, dtype=FP8)
        for rows in (512, 2048, 8192, 32768):
            given = tensor(rows, depth, dtype=FP8)
            one = torch.ones((), device="cuda")
            scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
            shape = {"rows": rows, "columns": columns, "depth": depth}

            def scaled(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
                return torch._scaled_mm(x, w.t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16)

            curves.add({"class": "fp8", "scales": "tensor", **shape}, lambda: scaled(one, one, given, weight))
            curves.add({"class": "fp8", "scales": "row", **shape}, lambda: scaled(*scales, given, weight))


def attention(curves: Curves) -> None:
    """Fused causal attention, forward and backward, by backend."""
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for head, queries, keys in HEADS:
        for length in LENGTHS:
            batch = max(1, ATTENTION_TOKENS // length)
            q = tensor(batch, queries, length, head).requires_grad_()
            k, v = (tensor(batch, keys, length, head).requires_grad_() for _ in range(2))
            shape = {"head": head, "heads": queries, "kv_heads": keys, "length": length, "batch": batch}
            for name, backend in backends.items():
                with sdpa_kernel(backend):

                    def forward() -> torch.Tensor:
                        return functional.scaled_dot_product_attention(
                            q, k, v, is_causal=True, enable_gqa=True
                        )

                    curves.add({"class": "attention", "pass": "forward", "backend": name, **shape}, forward)
                    try:
                        out = forward()
                    except RuntimeError:
                        continue
                    grad = torch.ones_like(out)
                    curves.add(
                        {"class": "attention", "pass": "backward", "backend": name, **shape},
                        lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
                    )


def grouped_gemms(curves: Curves) -> None:
    """Grouped GEMMs with even groups: into the experts, and their weight gradient."""
    for experts, width, inner in EXPERTS:
        weight = tensor(experts, width, 2 * inner)
        for tokens in EXPERT_TOKENS:
            rows = experts * tokens
            if rows * 2 * inner > MOST_ELEMENTS or rows > 2**18:
                continue
            ends = torch.arange(tokens, rows + 1, tokens, device="cuda", dtype=torch.int32)
            given, grad = tensor(rows, width), tensor(rows, 2 * inner)
            shape = {"experts": experts, "rows": tokens, "columns": 2 * inner, "depth": width}
            curves.add(
                {"class": "grouped", "pass": "forward", **shape},
                lambda: torch._grouped_mm(given, weight, offs=ends),
            )
            curves.add(
                {"class": "grouped", "pass": "weight", **shape},
                lambda: torch._grouped_mm(given.t(), grad, offs=ends),
            )
            if experts <= 32:

                def loop() -> None:
                    for index, part in enumerate(given.split(tokens)):
                        part @ weight[index]

                curves.add({"class": "loop", "pass": "forward", **shape}, loop)


def elementwise(curves: Curves) -> None:
    """Copy, addition, RMS norm, SwiGLU and dispatch, by bytes of the input."""
    for size in BYTES:
        width = 4096
        x = tensor(max(1, size // 2 // width), width)
        y, out, scale = torch.randn_like(x), torch.empty_like(x), tensor(width)
        row = {"class": "elementwise", "bytes": x.numel() * 2}
        curves.add({**row, "kernel": "copy", "moved": 2}, lambda: out.copy_(x))
        curves.add({**row, "kernel": "add", "moved": 3}, lambda: torch.add(x, y, out=out))
        curves.add({**row, "kernel": "rms_norm", "moved": 2}, lambda: functional.rms_norm(x, (width,), scale))
        curves.add({**row, "kernel": "silu_mul", "moved": 5}, lambda: functional.silu(x) * y)
        order = torch.randperm(x.shape[0], device="cuda")
        curves.add({**row, "kernel": "gather_rows", "moved": 2}, lambda: x[order])
        curves.add({**row, "kernel": "cast_fp8", "moved": 1.5}, lambda: x.to(FP8))


def optimizer(curves: Curves) -> None:
    """Fused AdamW on the GPU and on the CPU, and copies between them."""
    for place, count in (("cuda", 2**28), ("cpu", 2**26)):
        weight = torch.zeros(count, device=place, requires_grad=True)
        weight.grad = torch.full_like(weight, 1e-3)
        step = torch.optim.AdamW([weight], lr=1e-3, fused=True).step
        curves.add({"class": "adamw", "device": place, "parameters": count}, step)
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    row = {"class": "host copy", "bytes": 2**28}
    curves.add({**row, "to": "device"}, lambda: there.copy_(pinned, non_blocking=True))
    curves.add({**row, "to": "host"}, lambda: pinned.copy_(there, non_blocking=True))


def sustained(curves: Curves) -> None:
    """The rate of a large GEMM while the device is at its power limit."""
    a, b = tensor(8192, 8192), tensor(8192, 8192)
    narrow = a.to(FP8), b.to(FP8), torch.ones((), device="cuda")
    works: Iterable[tuple[str, Callable[[], Any]]] = (
        ("bf16", lambda: a @ b.t()),
        (
            "fp8",
            lambda: torch._scaled_mm(
                narrow[0], narrow[1].t(), scale_a=narrow[2], scale_b=narrow[2], out_dtype=torch.bfloat16
            ),
        ),
    )
    for name, work in works:
        until = time.monotonic() + SUSTAINED_S
        while time.monotonic() < until:
            for _ in range(50):
                work()
            torch.cuda.synchronize()
        curves.add({"class": "sustained", "precision": name, "rows": 8192}, work)


def main() -> None:
    """Measure all classes and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file to write")
    out: Path = parser.parse_args().out
    curves = Curves()
    for part in (gemms, grouped_gemms, attention, elementwise, optimizer, sustained, fp8_gemms):
        try:
            part(curves)
        except RuntimeError as error:
            curves.rows.append({"class": part.__name__, "error": str(error).splitlines()[0][:200]})
        torch.cuda.empty_cache()
        print(f"{part.__name__}: {len(curves.rows)} rows, {curves.spent_s:.0f} s", flush=True)
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": curves.rows}
        out.write_text(json.dumps(about, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
