"""Runs the collectives of one process group in the order of their calls; the ``Work`` of asynchronous ones.

A synchronous call runs in the thread of the caller if no other call is pending. All other calls run in a
thread of the group, so that calls on different groups do not wait for each other.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Run = Callable[[], None]
Observe = Callable[[Callable[[], Any]], Any]
"""Calls a function that waits for other ranks, and records the time (the flight recorder)."""
NO_WORK_SECONDS = timedelta(0)


class SharedMemoryWork(dist.Work):
    """One call. C++ callers (DDP's reducer, functional collectives) call ``wait`` and ``get_future``, too.

    The Python object must outlive the call, but C++ keeps only its base. So the lane holds it until a caller
    has waited for it or has taken its future.
    """

    def __init__(self, run: Run, result: Any, lane: Lane) -> None:
        """Begin a call that is to run.

        Args:
            run: The collective.
            result: Tensors, as the value of the future.
            lane: Queue of the group.
        """
        super().__init__()
        self._run, self._result, self._lane = run, result, lane
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self._mutex = threading.Lock()
        self._finished = False
        self._callback: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def execute(self) -> None:
        """Run the collective; in the thread of the group."""
        try:
            self._run()
        except Exception as error:
            self._error = error
        del self._run

    def conclude(self) -> None:
        """Wake the threads that wait for this call, and run the callbacks of the future."""
        with self._mutex:
            self._finished = True
            callback = self._callback
        self._done.release()
        if callback is not None:
            callback.set_result(None)

    def is_completed(self) -> bool:
        """Whether it has run."""
        if self._finished:
            self._lane.works.discard(self)
        return self._finished

    def is_success(self) -> bool:
        """Whether it has run without an error."""
        return self.is_completed() and self._error is None

    def wait(self, timeout: timedelta = NO_WORK_SECONDS) -> bool:
        """Wait until it has run; raises its error.

        Raises:
            RuntimeError: The timeout is over; zero means none.
        """
        self._lane.serve_own_thread()
        if not self._finished:
            self._lane.observe(lambda: self._wait(timeout.total_seconds()))
        self._lane.works.discard(self)
        if self._error is not None:
            raise self._error
        return True

    def _wait(self, timeout_s: float) -> None:
        if not self._done.acquire(timeout=timeout_s if timeout_s > 0 else -1):
            raise RuntimeError(f"Timed out after {timeout_s:g} s in a collective")
        self._done.release()

    def get_future(self) -> torch.futures.Future[Any]:
        """The future of the result tensors.

        Its callback raises the error, so that C++ sees a failed future. With ``set_exception``, C++ would
        read the exception as a result.
        """
        with self._mutex:
            if self._future is None:
                callback: torch.futures.Future[None] = torch.futures.Future()
                self._future = callback.then(self._take)
                if self._finished:
                    callback.set_result(None)
                else:
                    self._callback = callback
        self._lane.works.discard(self)
        return self._future

    def result(self) -> Any:
        """The result tensors."""
        return self._result

    def _take(self, _: torch.futures.Future[None]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Lane:
    """The calls of one group."""

    def __init__(self, name: str, observe: Observe) -> None:
        self.observe = observe
        self.works: set[SharedMemoryWork] = set()
        """Calls that no Python object may refer to any more, and whose result is not taken yet."""
        self._name = name
        self._mutex = threading.Lock()
        self._run_lock = threading.Lock()
        """Held while a call runs."""
        self._pending = 0
        self._queue: queue.SimpleQueue[SharedMemoryWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run_now(self, run: Run) -> bool:
        """Run a synchronous call in this thread, if no other is pending; returns whether it ran."""
        self.serve_own_thread()
        with self._mutex:
            if self._pending:
                return False
            self._pending += 1
            self._run_lock.acquire()
        try:
            self.observe(run)
        finally:
            self._run_lock.release()
            self._end()
        return True

    def submit(self, run: Run, result: Any) -> SharedMemoryWork:
        """Run a call after those before it, in the thread of the group.

        A callback of a future is in that thread already, and may wait for the call: it runs at once. So does
        a call of another thread while the lane is closed: its transport raises an error.
        """
        work = SharedMemoryWork(run, result, self)
        self.works.add(work)
        own = threading.current_thread() is self._thread
        if own:
            self.serve_own_thread()
        with self._mutex:
            self._pending += 1
            now = own or self._closed
            if not now:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                    self._thread.start()
                self._queue.put(work)
        if now:
            self._execute(work)
        return work

    def close(self, wait_s: float | None = None) -> None:
        """End the thread, after the calls that are queued.

        Args:
            wait_s: How long to wait for it; None for its end. It never keeps a process alive.
        """
        with self._mutex:
            self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(wait_s)
        self.works.clear()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            self._execute(work)
            del work

    def serve_own_thread(self) -> None:
        """Run the queued calls if this is the thread of the group: a callback of a future waits for them."""
        if threading.current_thread() is not self._thread:
            return
        with contextlib.suppress(queue.Empty):
            while (work := self._queue.get_nowait()) is not None:
                self._execute(work)
            self._queue.put(None)  # the lane is closed: the thread must end

    def _execute(self, work: SharedMemoryWork) -> None:
        with self._run_lock:
            work.execute()
        self._end()
        work.conclude()

    def _end(self) -> None:
        with self._mutex:
            self._pending -= 1
