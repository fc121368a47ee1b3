"""How long work takes on a GPU, by its own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

SHORTEST_S = 1e-6
"""No call takes less."""


def count_calls(seconds: float, one_s: float, fewest: int) -> int:
    """How many calls take so many seconds, at least some."""
    return max(fewest, round(seconds / max(one_s, SHORTEST_S)))


def elapsed_s(call: Callable[[], object], count: int) -> float:
    """Seconds of one of so many calls, one behind the other on the current GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
