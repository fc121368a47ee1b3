"""Runs collective schedules without torch: the same objects over queues and over plain sockets.

A transport has two calls, ``send`` and ``receive``; messages of a pair of ranks stay in order. A collective
needs nothing else. Each rank is a thread here; the sockets are real TCP connections. Try it:

    python examples/collective_transport.py all_reduce ring 4
"""

from __future__ import annotations

import socket
import sys
import threading
from queue import SimpleQueue

import numpy as np

from meshwright import build_collective, prove_collective
from meshwright.schedule.collective.steps import CollectiveSchedule, Receive, Send

WAIT_S = 30.0
"""A rank that waits longer for a message gives up."""


class Queues:
    """One queue per pair of ranks."""

    def __init__(self, ranks: int) -> None:
        pairs = [(source, target) for source in range(ranks) for target in range(ranks)]
        self.queues: dict[tuple[int, int], SimpleQueue[bytes]] = {pair: SimpleQueue() for pair in pairs}

    def send(self, source: int, messages: list[tuple[int, bytes]]) -> None:
        """Send messages, each to a target."""
        for target, data in messages:
            self.queues[source, target].put(data)

    def receive(self, source: int, target: int, size: int) -> bytes:
        """Receive the next message of this size; a queue keeps messages whole."""
        return self.queues[source, target].get(timeout=WAIT_S)


class Sockets:
    """One TCP connection per pair of ranks and direction."""

    def __init__(self, ranks: int) -> None:
        self.outgoing, self.incoming = {}, {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            for pair in [(source, target) for source in range(ranks) for target in range(ranks)]:
                self.outgoing[pair] = socket.create_connection(server.getsockname(), WAIT_S)
                self.incoming[pair], _ = server.accept()
                self.incoming[pair].settimeout(WAIT_S)

    def send(self, source: int, messages: list[tuple[int, bytes]]) -> None:
        """Send messages, each to a target; waits while the buffers of the connection are full."""
        for target, data in messages:
            self.outgoing[source, target].sendall(data)

    def receive(self, source: int, target: int, size: int) -> bytes:
        """Receive a message of this size; TCP delivers it in parts."""
        data = bytearray()
        while len(data) < size:
            part = self.incoming[source, target].recv(size - len(data))
            if not part:
                raise ConnectionError(f"rank {source} closed its connection to rank {target}")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self.outgoing.values(), *self.incoming.values()):
            connection.close()


def run_rank(
    schedule: CollectiveSchedule, rank: int, buffer: np.ndarray, transport: Queues | Sockets
) -> None:
    """The interpreter: the steps of one rank, in order. The buffer is changed in place."""
    tensors = schedule.ranks if schedule.op == "all_to_all" else 1  # see CollectiveSchedule.buffer_elements
    spans = schedule.spans(len(buffer) // tensors)

    def chunks(message: Send | Receive) -> np.ndarray:
        return buffer[spans[message.start][0] : spans[message.stop - 1][1]]

    for step in schedule.rows[rank]:
        # Sends run beside receives: ranks that all send first would wait forever when the buffers are full.
        messages = [(send.peer, chunks(send).tobytes()) for send in step.sends]
        sender = threading.Thread(target=transport.send, args=(rank, messages))
        sender.start()
        for receive in step.receives:
            target = chunks(receive)
            data = np.frombuffer(transport.receive(receive.peer, rank, target.nbytes), dtype=buffer.dtype)
            target[:] = target + data if receive.combine == "reduce" else data
        sender.join()


def run_collective(
    schedule: CollectiveSchedule, buffers: list[np.ndarray], transport: Queues | Sockets
) -> None:
    """Run all ranks, one thread each."""
    ranks = enumerate(buffers)
    threads = [threading.Thread(target=run_rank, args=(schedule, *rank, transport)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if isinstance(transport, Sockets):
        transport.close()


if __name__ == "__main__":
    op, algorithm, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    collective = build_collective(op, algorithm, count)
    print(f"{op} by {algorithm} on {count} ranks: {prove_collective(collective).proof.steps} steps")
    for kind in (Queues, Sockets):
        arrays = [np.arange(10) * 10**rank for rank in range(count)]
        run_collective(collective, arrays, kind(count))
        print(f"{kind.__name__}: rank 0 has {arrays[0]}")
