"""GPU time of a function, by CUDA events."""

from __future__ import annotations

from collections.abc import Callable

import torch

MIN_CALL_S = 1e-6
"""Lower bound of one call's time."""


def count_calls(seconds: float, call_s: float, min_calls: int) -> int:
    """The number of calls that take about ``seconds``, at least ``min_calls``."""
    return max(min_calls, round(seconds / max(call_s, MIN_CALL_S)))


def elapsed_s(call: Callable[[], object], count: int) -> float:
    """Mean seconds of ``count`` back-to-back calls on the current GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
