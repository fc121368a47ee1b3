"""How long work takes on a GPU, by its own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch


def elapsed_s(call: Callable[[], object], count: int) -> float:
    """Seconds of one of so many calls, one behind the other on the current GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count
