"""Live CPU memory of compiled code, from torch's memory profiler.

Compiled code allocates without dispatching operators, so ``PeakTracker`` does not see it. The profiler
records every allocation of torch's CPU allocator, and when it is freed. It does not know the size of what was
allocated before: such memory counts as live to the end.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_ALLOCATION = "[memory]"
_MARK = "meshwright mark"


class AllocationProfile:
    """Bytes allocated and not freed since the start: between marks, and at the peak."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._at_marks: list[int] = []
        self._is_running = False
        self.peak_bytes = 0
        """Known after the end."""

    def start(self) -> None:
        """Start to record."""
        self._profile.start()
        self._is_running = True

    def mark(self) -> None:
        """Mark a point in time."""
        with record_function(_MARK):
            pass

    def stop(self) -> None:
        """End, if it has not ended, and replay all allocations in the order of time."""
        if not self._is_running:
            return
        self._is_running = False
        self._profile.stop()
        results: Any = self._profile.profiler and self._profile.profiler.kineto_results
        kept = [event for event in results.events() if event.name() in (_ALLOCATION, _MARK)]
        live = 0
        for event in sorted(kept, key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                self._at_marks.append(live)
            else:
                live += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, live)

    def between_marks(self) -> list[int]:
        """Bytes that came between the first and the second mark, the third and the fourth, and so on."""
        starts, ends = self._at_marks[::2], self._at_marks[1::2]
        return [end - start for start, end in zip(starts, ends, strict=True)]
