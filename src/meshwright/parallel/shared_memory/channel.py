"""The shared memory of one process group: a rank writes to its slot, signals, and reads the others' slots.

A collective is a sequence of exchanges. In exchange ``e`` every rank writes to its slot of buffer
``e % 4``, sets its counter to ``e + 1``, waits until all counters have reached that, and reads. A rank may
write exchange ``e + 1`` before it reads exchange ``e``. Then it has at most written exchange ``e + 2`` when
another rank still reads exchange ``e - 1``, so four buffers are enough, without other synchronization.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.layout.shared_memory import BUFFERS, LINE, Region
from meshwright.parallel.shared_memory import futex

Bytes = npt.NDArray[np.uint8]
LIVENESS_S = 0.1
"""A waiting rank checks at this interval that the other ranks live and that it was not told to leave."""
SPINS = 100
"""Reads of a counter before the rank sleeps in the kernel, if each rank has a core: a few microseconds."""
MASK = 0xFFFFFFFF
HALF = 0x80000000
WORDS_PER_LINE = LINE // 4
SIGNATURES_AT = 4
"""Offset, in 32-bit words of a rank's cache line, of the signatures of its calls in the last exchanges."""


class PeerLostError(RuntimeError):
    """Another rank of the group has ended, or this rank was told to leave its collectives."""


class Peers:
    """The processes of the other ranks, and whether this rank was told to leave."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Watch processes.

        Args:
            pids: By global rank, without this one.
        """
        self.aborted = False
        self._mutex = threading.Lock()
        """Groups wait in their own threads, and one poll object serves one thread at a time."""
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        try:
            for rank, pid in pids.items():
                fd = os.pidfd_open(pid)
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
        except OSError as error:
            self.close()
            if isinstance(error, ProcessLookupError):
                message = "Connection closed by peer: another rank ended while the ranks joined"
                raise PeerLostError(message) from None
            raise

    def check(self, members: tuple[int, ...]) -> None:
        """Look at the processes of some ranks.

        Raises:
            PeerLostError: One has ended, or this rank must leave.
        """
        if self.aborted:
            raise PeerLostError("Connection closed by peer: this rank was told to leave its collectives")
        with self._mutex:
            ended = [self._ranks[fd] for fd, _ in self._poll.poll(0) if self._ranks[fd] in members]
        if ended:
            raise PeerLostError(f"Connection closed by peer: rank {ended[0]} has ended")

    def close(self) -> None:
        """Stop watching."""
        self.aborted = True
        with self._mutex:
            for fd in self._ranks:
                self._poll.unregister(fd)
                os.close(fd)
            self._ranks = {}


class Channel:
    """One rank's end of the shared memory of a group. One thread uses it at a time."""

    def __init__(
        self, memory: mmap.mmap, region: Region, rank: int, peers: Peers, timeout_s: float, spin: bool
    ) -> None:
        """Take over the end of a rank.

        Args:
            memory: Memory of all groups.
            region: Region of this group.
            rank: This rank, in the group.
            peers: Processes of the other ranks.
            timeout_s: Timeout, in seconds, of a collective, unless its call has another one.
            spin: Whether every rank has a core of its own.
        """
        self.rank, self.size, self.slot_bytes = rank, len(region.ranks), region.slot_bytes
        self._members, self._peers, self._timeout_s = region.ranks, peers, timeout_s
        data: Bytes = np.frombuffer(memory, np.uint8)
        address = data.ctypes.data + region.offset
        self._words = memoryview(memory)[region.offset : region.data_offset].cast("I")
        others = [(rank + i) % self.size for i in range(1, self.size)]
        self._others = [
            (other, other * WORDS_PER_LINE, ctypes.c_void_p(address + other * LINE)) for other in others
        ]
        self._own_at, self._own_address = rank * WORDS_PER_LINE, ctypes.c_void_p(address + rank * LINE)
        self._slots = data[region.data_offset : region.end].reshape(BUFFERS, self.size, region.slot_bytes)
        self._count = 0
        self._signature = 0
        self._limit_s, self._deadline = timeout_s, math.inf
        self._spins = SPINS if spin else 1
        self._wait = futex.Timeout(LIVENESS_S)

    def begin(self, signature: int, timeout_s: float | None = None) -> None:
        """Begin a collective.

        Args:
            signature: All ranks of the group must have the same.
            timeout_s: By default that of the channel.
        """
        self._signature = signature & MASK
        self._limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._limit_s

    def pipeline(
        self, rounds: int, write: Callable[[int, Bytes], Any], read: Callable[[int, Any], Any]
    ) -> None:
        """Run exchanges: write one ahead of the one that is read.

        Args:
            rounds: Number of exchanges.
            write: Called with the round and the rank's own slot.
            read: Called with the round and the slots of all ranks.
        """
        first = self._count
        for ahead in range(rounds):
            write(ahead, self._slots[(first + ahead) % BUFFERS, self.rank])
            self._signal()
            if ahead:
                self._await(first + ahead)
                read(ahead - 1, self._slots[(first + ahead - 1) % BUFFERS])
        if rounds:
            self._await(first + rounds)
            read(rounds - 1, self._slots[(first + rounds - 1) % BUFFERS])

    def _signal(self) -> None:
        """Signal to the other ranks that they may read this rank's slot."""
        count = self._count
        self._words[self._own_at + SIGNATURES_AT + count % BUFFERS] = self._signature
        self._count = count + 1
        self._words[self._own_at] = (count + 1) & MASK
        futex.wake(self._own_address)

    def _await(self, count: int) -> None:
        """Wait until all ranks have written exchange ``count - 1``, and compare what they call."""
        words, wanted = self._words, count & MASK
        signature_at = SIGNATURES_AT + (count - 1) % BUFFERS
        for other, at, address in self._others:
            if (words[at] - wanted) & HALF:
                self._await_one(at, address, wanted)
            if words[at + signature_at] != self._signature:
                raise RuntimeError(
                    f"ranks {self._members[self.rank]} and {self._members[other]} called different "
                    "collectives, or the same one with other sizes"
                )

    def _await_one(self, at: int, address: ctypes.c_void_p, wanted: int) -> None:
        words, peers = self._words, self._peers
        for _ in range(self._spins):
            if not (words[at] - wanted) & HALF:
                return
        next_check = time.monotonic() + LIVENESS_S
        while True:
            value = words[at]
            if not (value - wanted) & HALF:
                return
            if not peers.aborted:
                self._wait.wait(address, value)  # a signal interrupts it, too
                if (now := time.monotonic()) < next_check:
                    continue
                next_check = now + LIVENESS_S
            try:
                peers.check(self._members)
            except PeerLostError:
                if peers.aborted or (words[at] - wanted) & HALF:
                    raise
                return  # it wrote, and ended
            if time.monotonic() > self._deadline:
                raise PeerLostError(f"Timed out after {self._limit_s:g} s in a collective")
