"""Writes the flight recorder of this rank: heartbeats, step and phase, and every collective with its caller.

The memory belongs to the agent (``core.flight_ring``); the supervisor reads it when this rank is stopped or
dead. Without an agent that provides it (torchrun, tests) the rank writes into memory of its own. A record
costs a few microseconds, a phase less than one.

The end of a collective is known where Python waits for it right after the call, which all synchronous calls
of ``torch.distributed`` do. Waits in C++ (DDP's reducer, functional collectives) and later waits for
asynchronous calls are not attributed to a record.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core import flight_ring as ring
from meshwright.core.events import warn
from meshwright.measure.functional_waits import observe_functional_waits
from meshwright.measure.own_time import OwnTime

SKIPPED_CODE = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1] / 'parallel' / 'shared_memory'}{os.sep}",
    "<",
)
"""Code that does not call a collective: torch, this package, the shared-memory transport, generated code; and
the standard library."""
STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages, inside of the standard library."""
PACKAGE_PARENT = f"{Path(__file__).parents[2]}{os.sep}"
PHASE_NUMBERS = {name: number for number, name in enumerate(ring.PHASES)}
BACKWARD = PHASE_NUMBERS["backward"]

Item = TypeVar("Item")
_background = threading.local()


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Collectives that this thread calls are recorded, and change neither waits nor own time of the rank."""
    _background.on = True
    try:
        yield
    finally:
        _background.on = False


class FlightRecorder:
    """The writer. Calls from several threads are safe under the GIL: every record has its own slot."""

    def __init__(self) -> None:
        self._memory = _open_memory()
        self._clear()
        self._changes = 0
        self.own_time = OwnTime()
        self._unfinished = -1
        """The record of a synchronous call whose wait comes next."""
        self._main_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._measures_memory = False
        self._progress = b""
        """Step, phase and number of calls at the last heartbeat."""
        self._wait: Any = None
        self._functional_waits: Any = None
        self._heartbeat: threading.Thread | None = None

    def _clear(self) -> None:
        """Forget all calls and texts."""
        self._memory[:] = bytes(ring.SIZE)
        self._texts: dict[str, int] = {"": 0}
        self._text_slots = count(1)
        self._sources: dict[CodeType, int] = {}
        self._channels: dict[tuple[str, str, int], tuple[int, Iterator[int]]] = {}
        self._calls = count(0)
        self._step, self._phase = 0, 0

    def start(self, rank: int, generation: int) -> None:
        """Begin a generation: clear the memory, write header and heartbeat, and observe ``Work.wait``."""
        self._clear()
        ring.IDENTITY.pack_into(self._memory, 0, ring.MAGIC, ring.VERSION, os.getpid(), rank, generation)
        self._beat()
        self.enter("setup")
        if self._heartbeat is None:
            self._observe_waits()
            self._heartbeat = threading.Thread(target=self._beat_until_stopped, name="heartbeat", daemon=True)
            self._heartbeat.start()

    def stop(self) -> None:
        """Stop the heartbeat and the observation of waits."""
        self._stopped.set()
        if self._wait is not None:
            dist.Work.wait = self._wait  # type: ignore[method-assign]
            self._wait = None
            self._functional_waits._destroy()
            self.own_time.close()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note what the rank does from now on.

        Args:
            phase: One of ``PHASES``.
            step: The step that begins, from 1; None for the same one.
        """
        if step is not None:
            self._step = step
        self._changes += 1
        self._phase, now_ns = PHASE_NUMBERS[phase], time.monotonic_ns()
        self.own_time.enter(phase, now_ns)
        ring.PROGRESS.pack_into(
            self._memory, ring.PROGRESS_AT, self._step, self._phase, now_ns, self._changes
        )

    def read_data(self, items: Iterable[Item], phase: str, last_phase: str | None = None) -> Iterator[Item]:
        """Iterate over micro-batches: reading one is ``waiting for data``.

        Args:
            items: The micro-batches.
            phase: The phase after each of them was read.
            last_phase: The phase after all were read; ``phase`` by default.
        """
        iterator = iter(items)
        while True:
            self.enter("waiting for data")
            try:
                item = next(iterator)
            except StopIteration:
                self.enter(last_phase or phase)
                return
            self.enter(phase)
            yield item

    def note_error(self, message: str) -> None:
        """Note the error that ends this rank."""
        self._write_text(ring.RAISED_AT, ring.NOTE_BYTES, " ".join(message.split()))

    def record(
        self,
        axis: str,
        group: dist.ProcessGroup,
        op: str,
        peer: int,
        tensors: Sequence[Tensor],
        synchronous: bool,
    ) -> None:
        """Record a call that is about to be issued.

        Args:
            axis: Axis of the group.
            group: Whose ranks take part.
            op: Name of the collective; ``send`` and ``recv``.
            peer: The other rank of a send or receive, in the group; -1 for a collective and for any rank.
            tensors: The largest argument.
            synchronous: Whether the caller waits for it at once.
        """
        channel, numbers = self._find_channel(axis, group, op, peer)
        sequence, index, now_ns = next(numbers), next(self._calls), time.monotonic_ns()
        shape: tuple[int, ...] = tuple(tensors[0].shape) if len(tensors) == 1 else ()
        dims = len(shape) if len(tensors) == 1 else ring.MOST_DIMS + 1
        source, line = self._find_caller()
        ring.RECORD.pack_into(
            self._memory,
            ring.RECORDS_AT + index % ring.RECORDS * ring.RECORD.size,
            index + 1,
            now_ns,
            0,
            sequence,
            sum(tensor.numel() for tensor in tensors),
            line,
            self._step,
            channel,
            self._text(op),
            self._text(str(tensors[0].dtype)[6:] if tensors else ""),
            source,
            0,
            self._phase,
            min(dims, ring.MOST_DIMS + 1),
            *(*shape, 0, 0, 0, 0)[: ring.MOST_DIMS],
        )
        ring.WORD.pack_into(self._memory, ring.CALLS_AT + channel * ring.WORD.size, sequence)
        ring.WORD.pack_into(self._memory, ring.COUNT_AT, index + 1)
        if getattr(_background, "on", False):
            return
        self._unfinished = index if synchronous else -1
        if not synchronous:
            self.own_time.issue(now_ns, in_backward=self._phase == BACKWARD)

    def note_issued(self) -> None:
        """Note that another thread begins asynchronous collectives for this one."""
        self._unfinished = -1
        self.own_time.issue(time.monotonic_ns(), in_backward=self._phase == BACKWARD)

    def _find_channel(
        self, axis: str, group: dist.ProcessGroup, op: str, peer: int
    ) -> tuple[int, Iterator[int]]:
        """Number of the channel's text, and the sequence numbers of its calls."""
        is_p2p = op in ("send", "recv")
        key = (group.group_name, op if is_p2p else "", peer)
        found = self._channels.get(key)
        if found is None:
            ranks = dist.get_process_group_ranks(group)
            direction, members = "", tuple(ranks)
            if is_p2p:
                own, other = ranks[group.rank()], ranks[peer] if peer >= 0 else "any"
                source, target = (own, other) if op == "send" else (other, own)
                direction = f"{source}>{target}"
                members = tuple(rank for rank in (source, target) if isinstance(rank, int))
            text = ring.Channel(axis, group.group_name, direction, members).to_text()
            found = self._channels[key] = self._text(text), count(1)
        return found

    def _find_caller(self) -> tuple[int, int]:
        """Text and line of the innermost frame that is not torch's or ours."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            source = self._sources.get(code)
            if source is None:
                name = code.co_filename
                source = -1 if _is_skipped(name) else self._text(_shorten(name))
                self._sources[code] = source
            if source >= 0:
                return source, _line_of(frame)
            frame = frame.f_back
        return 0, 0

    def _text(self, text: str) -> int:
        """Number of a text in the table; 0 when it is full."""
        number = self._texts.get(text)
        if number is None:
            number = next(self._text_slots)
            if number >= ring.TEXTS:
                number = 0
            else:
                self._write_text(ring.TEXTS_AT + number * ring.TEXT_BYTES, ring.TEXT_BYTES, text)
            self._texts[text] = number
        return number

    def _write_text(self, offset: int, size: int, text: str) -> None:
        content = ring.encode_text(text, size, keep_end="\t" not in text)
        self._memory[offset : offset + len(content)] = content

    def _beat_until_stopped(self) -> None:
        while not self._stopped.wait(ring.HEARTBEAT_S):
            self._beat()

    @contextlib.contextmanager
    def measuring_memory(self) -> Iterator[None]:
        """While memory is measured, heartbeats look at the stack only if the rank has made no progress.

        A frame that another thread holds outlives its call, and so do the tensors of its variables.
        """
        self._measures_memory = True
        try:
            yield
        finally:
            self._measures_memory = False

    def _beat(self) -> None:
        """Write the time, and the line at which the main thread is."""
        before, self._progress = self._progress, self._memory[ring.PROGRESS_AT : ring.WAIT_AT]
        name, line = "", 0
        if not self._measures_memory or before == self._progress:
            name, line = self._find_line()
        self._write_text(ring.BEAT_SOURCE_AT, ring.NOTE_BYTES, _shorten(name))
        ring.BEAT.pack_into(self._memory, ring.BEAT_AT, time.monotonic_ns(), line)

    def _find_line(self) -> tuple[str, int]:
        """File and line at which the main thread is. On return no frame is held: see ``measuring_memory``."""
        frame: FrameType | None = sys._current_frames().get(self._main_thread)
        while frame is not None and _is_skipped(frame.f_code.co_filename):
            frame = frame.f_back
        return ("", 0) if frame is None else (frame.f_code.co_filename, _line_of(frame))

    def _observe_waits(self) -> None:
        """Write the begin of every wait in Python, and the end of calls that are waited for at once."""
        wait = self._wait = dist.Work.wait

        def observed_wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            return self.observe(lambda: wait(work, *args, **kwargs))

        dist.Work.wait = observed_wait  # type: ignore[assignment, method-assign]
        self._functional_waits = observe_functional_waits(self._begin_wait, self._end_wait)

    def observe(self, wait: Callable[[], Item]) -> Item:
        """Call a function that waits for other ranks; records its begin, and a synchronous call's end."""
        if getattr(_background, "on", False):
            return wait()
        index, self._unfinished = self._unfinished, -1
        self._begin_wait()
        try:
            result = wait()
        finally:
            end_ns = self._end_wait()
        if index >= 0:
            end_at = ring.RECORDS_AT + index % ring.RECORDS * ring.RECORD.size + 2 * ring.WORD.size
            ring.WORD.pack_into(self._memory, end_at, end_ns)
        return result

    def _begin_wait(self) -> None:
        """Begin a wait. It interrupts the own time of the main thread; threads that save have none."""
        now_ns = time.monotonic_ns()
        ring.WORD.pack_into(self._memory, ring.WAIT_AT, now_ns)
        if threading.get_ident() == self._main_thread:
            self.own_time.begin_wait(now_ns)

    def _end_wait(self) -> int:
        """End a wait; returns the time."""
        now_ns = time.monotonic_ns()
        ring.WORD.pack_into(self._memory, ring.WAIT_AT, 0)
        if threading.get_ident() == self._main_thread:
            self.own_time.end_wait(now_ns)
        return now_ns


def _line_of(frame: FrameType) -> int:
    """The line at which a frame is; in code that torch.compile generated there may be none."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def _shorten(file: str) -> str:
    """The path relative to the installed package, or to the working folder."""
    return file.removeprefix(PACKAGE_PARENT).removeprefix(f"{Path.cwd()}{os.sep}")


def _is_skipped(file: str) -> bool:
    in_library = file.startswith(STANDARD_LIBRARY) and not any(name in file for name in PACKAGES)
    return in_library or file.startswith(SKIPPED_CODE)


def _open_memory() -> mmap.mmap:
    """The memory that the launcher provides, or memory of this process."""
    path = os.environ.get(ring.FLIGHT_VARIABLE)
    if path is not None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            warn(f"the flight recorder is not readable by the launcher: {error}")
        else:
            memory = mmap.mmap(fd, ring.SIZE)
            os.close(fd)
            return memory
    return mmap.mmap(-1, ring.SIZE)
