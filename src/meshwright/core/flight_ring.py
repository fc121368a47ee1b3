"""The flight recorder of a rank in shared memory: its binary format, and the reader.

The agent creates the memory (a memfd) and keeps it, so that it can be read when the rank is stopped or
dead. The rank writes (``measure.flight_recorder``). All fields have a fixed size and a fixed place: a header,
a table of texts (source files, channels, operations), a counter per channel, and a ring of the last records.

A channel is what calls must agree on: a process group, or one direction between two ranks of a group. The
n-th call on a channel is the same collective on every rank. Times are ``CLOCK_MONOTONIC`` in nanoseconds of
the rank's machine; 0 is none.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FLIGHT_VARIABLE = "MESHWRIGHT_FLIGHT_RECORDER"
"""Path of the memory of a rank's flight recorder."""
MEMORY_NAME = "meshwright-flight-recorder"
"""Name of the memfd, shown in ``/proc/PID/fd``."""
PHASES = (
    "setup",
    "waiting for data",
    "forward",
    "backward",
    "update",
    "forward and backward",
    "control all-reduce",
    "evaluation",
    "checkpoint",
    "finished",
)
"""Phases of a rank; a pipeline alternates forward and backward passes. The header has the index."""
HEARTBEAT_S = 0.5
"""Seconds between two heartbeats."""

MAGIC = b"MWFLIGHT"
VERSION = 1
RECORDS = 1024
TEXTS = 256
TEXT_BYTES = 128
NOTE_BYTES = 192
MOST_DIMS = 4

IDENTITY = struct.Struct("<8sIIII")
"""Magic, version, pid, rank, generation."""
BEAT = struct.Struct("<QI")
"""Heartbeat, and the line of the main thread."""
PROGRESS = struct.Struct("<IIQQ")
"""Step, phase, begin of the phase, number of phase changes."""
WORD = struct.Struct("<Q")
RECORD = struct.Struct("<6QI5H2B4Q")
"""Index plus one, begin, end, sequence number, elements, line, step; texts of channel, op, dtype and source
file; unused; phase; number of dims; the first dims."""

BEAT_AT, PROGRESS_AT, COUNT_AT, WAIT_AT = 32, 48, 80, 88
BEAT_SOURCE_AT = 128
RAISED_AT = BEAT_SOURCE_AT + NOTE_BYTES
TEXTS_AT = 512
CALLS_AT = TEXTS_AT + TEXTS * TEXT_BYTES
"""Calls on each channel, by the number of its text."""
RECORDS_AT = CALLS_AT + TEXTS * WORD.size
SIZE = RECORDS_AT + RECORDS * RECORD.size


@dataclass(frozen=True)
class Channel:
    """A process group, or one direction between two of its ranks."""

    axis: str
    group: str
    """The group's name, the same on all its ranks."""
    direction: str
    """``source>target`` of sends and receives, in global ranks; empty for collectives."""
    members: tuple[int, ...]
    """Global ranks; empty if there are too many to store."""

    def to_text(self) -> str:
        """The channel in the table of texts."""
        members = ",".join(str(rank) for rank in self.members)
        text = "\t".join((self.axis, self.group, self.direction, members))
        return text if len(text.encode()) <= TEXT_BYTES - 2 else text[: -len(members)]

    @classmethod
    def from_text(cls, text: str) -> Channel:
        """A channel of the table of texts."""
        axis, group, direction, members = (*text.split("\t"), "", "", "", "")[:4]
        return cls(axis, group, direction, tuple(int(rank) for rank in members.split(",") if rank))


@dataclass(frozen=True)
class CallRecord:
    """One collective, send or receive of a rank."""

    channel: Channel
    sequence: int
    """Which call on the channel, from 1."""
    op: str
    dtype: str
    numel: int
    """Elements of the largest tensor argument."""
    shape: tuple[int, ...] | None
    """Its shape; None for several tensors or more than four dims."""
    source: str
    """``file:line`` of the caller: the innermost frame outside of torch."""
    step: int
    phase: str
    begin_ns: int
    """When it was issued."""
    end_ns: int = 0
    """When the rank had waited for it; 0 if it has not, or if the wait was not seen (C++, futures)."""


@dataclass(frozen=True)
class RankProgress:
    """The header: where a rank is."""

    pid: int
    rank: int
    generation: int
    heartbeat_ns: int
    """Last heartbeat; 0 before the first."""
    source: str
    """``file:line`` of the main thread at the last heartbeat."""
    step: int
    """The step that runs, from 1; 0 before the first."""
    phase: str
    phase_begin_ns: int
    phase_changes: int
    calls: int
    """Collectives, sends and receives so far."""
    wait_begin_ns: int
    """Begin of the wait for a collective that has not returned; 0 if there is none."""
    raised: str
    """The error that ends the rank; empty if there is none."""


@dataclass(frozen=True)
class Flight:
    """Everything that a flight recorder has."""

    progress: RankProgress
    records: tuple[CallRecord, ...]
    """The last calls, oldest first."""
    issued: dict[tuple[str, str], int]
    """Number of calls so far, by group and direction."""


class FlightMemory:
    """The memory of one rank's flight recorder, in the process that owns it or in a reader."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)

    @classmethod
    def create(cls, rank: int) -> FlightMemory:
        """New memory for a rank, owned by this process."""
        fd = os.memfd_create(f"{MEMORY_NAME}-{rank}", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return cls(fd)

    @classmethod
    def open(cls, path: str) -> FlightMemory:
        """The memory of another process, to read.

        Raises:
            OSError: It cannot be opened.
            ValueError: It is not the memory of a flight recorder.
        """
        if MEMORY_NAME not in str(Path(path).readlink()):
            raise ValueError(f"{path} is not a flight recorder")
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where other processes of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        """Free the memory."""
        self._map.close()
        os.close(self.fd)

    def progress(self) -> RankProgress | None:
        """The header; None before the rank has written one."""
        return read_progress(self._map[:TEXTS_AT])

    def read(self) -> Flight | None:
        """Header and records; None before the rank has written any."""
        return read_flight(self._map[:])

    def copy(self, records: bool) -> bytes:
        """The header, or everything, to be sent to another machine."""
        return self._map[:] if records else self._map[:TEXTS_AT]


class RemoteFlight:
    """The flight recorder of a rank on another machine, as its agent last sent it.

    The age of a time at the other machine counts: ``read`` converts times to this machine's monotonic clock.
    """

    def __init__(self) -> None:
        self._data = bytearray(SIZE)
        self._offset_ns = 0

    def update(self, data: bytes, now_ns: int) -> None:
        """Take over the beginning of the memory, or all of it.

        Args:
            data: Header, or header and records.
            now_ns: The other machine's monotonic clock.
        """
        if len(data) in (TEXTS_AT, SIZE):
            self._data[: len(data)] = data
            self._offset_ns = time.monotonic_ns() - now_ns

    def progress(self) -> RankProgress | None:
        """The header, with times of the other machine; None before the rank has written one."""
        return read_progress(bytes(self._data[:TEXTS_AT]))

    def read(self) -> Flight | None:
        """Header and records; None before the rank has written any."""
        found = read_flight(bytes(self._data))
        if found is None:
            return None
        records = tuple(
            replace(r, begin_ns=self._shift(r.begin_ns), end_ns=self._shift(r.end_ns)) for r in found.records
        )
        progress = replace(
            found.progress,
            heartbeat_ns=self._shift(found.progress.heartbeat_ns),
            phase_begin_ns=self._shift(found.progress.phase_begin_ns),
            wait_begin_ns=self._shift(found.progress.wait_begin_ns),
        )
        return Flight(progress, records, found.issued)

    def close(self) -> None:
        """Nothing to free."""

    def _shift(self, time_ns: int) -> int:
        return max(1, time_ns + self._offset_ns) if time_ns else 0


def read_progress(data: bytes) -> RankProgress | None:
    """The header of a flight recorder; None if there is none of this version."""
    magic, version, pid, rank, generation = IDENTITY.unpack_from(data, 0)
    if (magic, version) != (MAGIC, VERSION):
        return None
    heartbeat_ns, line = BEAT.unpack_from(data, BEAT_AT)
    step, phase, begin_ns, changes = PROGRESS.unpack_from(data, PROGRESS_AT)
    return RankProgress(
        pid=pid,
        rank=rank,
        generation=generation,
        heartbeat_ns=heartbeat_ns,
        source=_join(_read_text(data, BEAT_SOURCE_AT, NOTE_BYTES), line),
        step=step,
        phase=PHASES[phase],
        phase_begin_ns=begin_ns,
        phase_changes=changes,
        calls=WORD.unpack_from(data, COUNT_AT)[0],
        wait_begin_ns=WORD.unpack_from(data, WAIT_AT)[0],
        raised=_read_text(data, RAISED_AT, NOTE_BYTES),
    )


def read_flight(data: bytes) -> Flight | None:
    """A copy of the memory as records. A record that is being written is left out."""
    progress = read_progress(data)
    if progress is None:
        return None
    texts = [_read_text(data, TEXTS_AT + slot * TEXT_BYTES, TEXT_BYTES) for slot in range(TEXTS)]
    channels = {number: Channel.from_text(text) for number, text in enumerate(texts) if "\t" in text}
    calls = struct.unpack_from(f"<{TEXTS}Q", data, CALLS_AT)
    issued = {(c.group, c.direction): calls[number] for number, c in channels.items() if calls[number]}
    first = max(0, progress.calls - RECORDS)
    records = [_read_record(data, index, texts, channels) for index in range(first, progress.calls)]
    return Flight(progress, tuple(r for r in records if r is not None), issued)


def _read_record(
    data: bytes, index: int, texts: list[str], channels: dict[int, Channel]
) -> CallRecord | None:
    fields: tuple[Any, ...] = RECORD.unpack_from(data, RECORDS_AT + index % RECORDS * RECORD.size)
    written, begin_ns, end_ns, sequence, numel, line, step, channel, op, dtype, source, _, phase, dims = (
        fields[:14]
    )
    if written != index + 1 or channel not in channels:
        return None
    shape = None if dims > MOST_DIMS else tuple(fields[14 : 14 + dims])
    return CallRecord(
        channel=channels[channel],
        sequence=sequence,
        op=texts[op],
        dtype=texts[dtype],
        numel=numel,
        shape=shape,
        source=_join(texts[source], line),
        step=step,
        phase=PHASES[phase],
        begin_ns=begin_ns,
        end_ns=end_ns,
    )


def encode_text(text: str, size: int, keep_end: bool = False) -> bytes:
    """A text with its length, as stored in a field of ``size`` bytes; longer ones are cut."""
    content = text.encode(errors="replace")
    content = content[-(size - 2) :] if keep_end else content[: size - 2]
    return len(content).to_bytes(2, "little") + content


def _read_text(data: bytes, offset: int, size: int) -> str:
    length = min(int.from_bytes(data[offset : offset + 2], "little"), size - 2)
    return data[offset + 2 : offset + 2 + length].decode(errors="replace")


def _join(source: str, line: int) -> str:
    return f"{source}:{line}" if source else ""
