"""When each bucket of gradients is ready and when its sum is there: what a benchmark needs to see overlap."""

from __future__ import annotations

import time
from typing import Any

import torch


class BucketTimes:
    """The moments of one backward pass, bucket by bucket, on the clock that the machine's processes share.

    On a GPU the host only queues: moments are events in the streams, read once the step is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._ready: dict[int, Any] = {}
        self._reduced: dict[int, Any] = {}
        self._origin: Any = None
        self._origin_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._ready, self._reduced = {}, {}
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._origin_s = time.perf_counter()
            self._origin = self._mark()

    def ready(self, bucket: int) -> None:
        """The bucket's gradients are complete on this rank and it is sent."""
        self._ready[bucket] = self._mark()

    def reduced(self, bucket: int) -> None:
        """Its sum is here."""
        self._reduced[bucket] = self._mark()

    def read(self) -> list[tuple[float, float]]:
        """Ready and reduced of each bucket in order, in seconds; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        assert self._ready.keys() == self._reduced.keys(), "a bucket was sent and never came back"
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
