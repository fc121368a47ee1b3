"""Times of each gradient bucket: when it is ready and when its all-reduce is done. Benchmarks see overlap."""

from __future__ import annotations

import time
from typing import Any

import torch


class BucketTimes:
    """The times of one backward pass, by bucket, on the clock that all processes of the machine share.

    On a GPU they are CUDA events, read after the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._ready: dict[int, Any] = {}
        self._reduced: dict[int, Any] = {}
        self._origin: Any = None
        self._origin_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._ready, self._reduced = {}, {}
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._origin_s = time.perf_counter()
            self._origin = self._mark()

    def ready(self, bucket: int) -> None:
        """Note that this rank's gradients are complete and the all-reduce starts."""
        self._ready[bucket] = self._mark()

    def reduced(self, bucket: int) -> None:
        """Note that the all-reduce is done."""
        self._reduced[bucket] = self._mark()

    def read(self) -> list[tuple[float, float]]:
        """Ready and reduced times of the buckets in order, in seconds. Synchronizes the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        assert self._ready.keys() == self._reduced.keys(), (
            "a bucket's all-reduce was started and not finished"
        )
        return [(self._seconds(self._ready[b]), self._seconds(self._reduced[b])) for b in sorted(self._ready)]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        if not self._on_gpu:
            return float(mark)
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1e3
