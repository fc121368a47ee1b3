"""Device time of a step by kind of kernel, from a trace of torch's profiler.

The kind follows from the kernel's name; the first matching rule counts. Inductor names kernels after the
operations in and around them, including attention: a kernel with a square root, but not its reciprocal, is
the optimizer's; one with an exponential or a logarithm is the loss.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

KINDS = (
    ("attention", r"^(?!triton).*(sdpa|flash|fmha|attention)"),
    ("GEMMs", r"triton_tem|^(?!triton).*(gemm|nvjet|cutlass|xmma|splitk|cublas|gemv)"),
    ("optimizer", r"adam|multi_tensor|foreach|(?<!r)sqrt|lpnorm"),
    ("loss", r"softmax|cross_entropy|nll_loss|_amax_|_exp_|_log_"),
    ("copies", r"memcpy|memset|copy_kernel|catarray|fillfunctor|fused__to_copy(_(t|view|transpose))*_\d+$"),
    ("elementwise", r""),
)
"""Kinds and patterns of kernel names."""
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Trace categories of device work."""
MOST_KERNELS = 40
MOST_GAPS = 10
SHOWN_GAPS = 4


def class_of(name: str) -> str:
    """The kind of a kernel."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name.lower()))


def fold_trace(rows: Iterable[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds per step by kind, with idle time, the longest gaps, and the longest kernels.

    Args:
        rows: ``traceEvents`` of a Chrome trace, times in microseconds.
        steps: Steps that the trace spans.
    """
    work = [row for row in rows if row.get("cat") in DEVICE_WORK and "dur" in row]
    if not work:
        return {"kinds_ms": {}, "span_ms": 0.0, "idle_ms": 0.0, "gaps": [], "kernels": []}
    spans = sorted((float(row["ts"]), float(row["ts"]) + float(row["dur"]), row["name"]) for row in work)
    busy, reached, before, gaps = 0.0, spans[0][0], spans[0][2], []
    for begin, end, name in spans:  # kernels of several streams may overlap
        busy += max(0.0, end - max(begin, reached))
        if begin > reached:
            gaps.append({"ms": (begin - reached) / 1e3, "after": before, "before": name})
        if end > reached:
            reached, before = end, name
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in work:
        kinds[class_of(row["name"])] += row["dur"]
        kernels[row["name"]][0] += 1
        kernels[row["name"]][1] += row["dur"]
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:MOST_KERNELS]
    span = reached - spans[0][0]
    scale = 1e3 * steps
    return {
        "kinds_ms": {kind: kinds[kind] / scale for kind, _ in KINDS if kind in kinds},
        "span_ms": span / scale,
        "idle_ms": (span - busy) / scale,
        "gaps": sorted(gaps, key=lambda gap: -gap["ms"])[:MOST_GAPS],
        "kernels": [
            {"name": name, "kind": class_of(name), "calls": count / steps, "ms": taken / scale}
            for name, (count, taken) in longest
        ],
    }


def describe(folded: dict[str, Any], shown: int = 20) -> list[str]:
    """The profile as text."""
    if "failed" in folded:
        return [f"  no profile: {line}" for line in folded["failed"].splitlines()]
    lines = [f"  {'span':14}{folded['span_ms']:9.2f} ms/step"]
    lines += [f"  {kind:14}{taken:9.2f} ms" for kind, taken in folded["kinds_ms"].items()]
    lines.append(f"  {'idle':14}{folded['idle_ms']:9.2f} ms")
    for gap in folded["gaps"][:SHOWN_GAPS]:
        lines.append(f"  {gap['ms']:8.2f} ms idle after {gap['after'][:50]}, before {gap['before'][:50]}")
    for row in folded["kernels"][:shown]:
        lines.append(f"  {row['ms']:8.2f} ms {row['calls']:6.0f} x {row['kind']:12} {row['name'][:100]}")
    return lines
