"""How long a rank takes until it can train, part by part; reported with the event ``ready``."""

from __future__ import annotations

import time


class SetupTimes:
    """Seconds of each part, measured from one ``end`` to the next."""

    def __init__(self, begun_at: float | None = None) -> None:
        """Start to measure.

        Args:
            begun_at: When the setup began, by ``time.perf_counter``; now by default.
        """
        self._last = time.perf_counter() if begun_at is None else begun_at
        self.seconds: dict[str, float] = {}
        """By part: those of ``elastic.recovery.SETUP_PARTS``."""

    def end(self, part: str) -> None:
        """A part has ended; a part that ends twice is added up."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
