"""Signals that a command collects, to act on them in its own loop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def caught_signals(on_quit: Callable[[], None]) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP; the caller's loop acts on them. SIGQUIT calls ``on_quit``."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not caught:  # a closing terminal may send it twice
            caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, catch) for number in numbers}
    before[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, lambda *_: on_quit())
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
