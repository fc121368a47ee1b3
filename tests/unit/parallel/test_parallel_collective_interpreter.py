"""The interpreter of collective schedules, on ranks that are threads with the strictest point-to-point calls.

Sends are rendezvous: a send waits for its receive. Data are copied as late as a backend may copy them, when
one side waits. Real process groups: ``tests/multiproc/test_collective_interpreter.py``.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import pytest
import torch

from collective_reference import make_inputs, wrong_chunks
from meshwright.core.errors import CheckFailedError, UserError
from meshwright.parallel.collective_interpreter import ScheduleRunner
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.steps import CollectiveSchedule

WAIT_S = 20.0
"""After which a rank that waits is in a deadlock."""
CASES = [(op.value, algorithm) for op in Op for algorithm in list_algorithms(op)]


class Exchange:
    """The messages between all ranks of a test."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Message]] = defaultdict(deque)


class Message:
    """One side of a message, and its work."""

    def __init__(self, exchange: Exchange, tensor: torch.Tensor) -> None:
        self.exchange, self.tensor = exchange, tensor
        self.other: Message | None = None
        self.source = self
        self.copied = self.waited = False

    def match(self, receive: Message) -> None:
        assert receive.tensor.numel() == self.tensor.numel(), "both sides split the message alike"
        self.other, receive.other, receive.source = receive, self, self

    def wait(self) -> None:
        assert not self.waited, "gloo cannot wait twice for one message"
        self.waited = True
        with self.exchange.changed:
            matched = self.exchange.changed.wait_for(lambda: self.other is not None, WAIT_S)
            assert matched, "deadlock"
            send = self.source
            if not send.copied:
                send.copied = True
                send.other.tensor.copy_(send.tensor)


class ThreadGroup:
    """The part of a process group that the interpreter uses."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self._exchange, self._rank, self._size = exchange, rank, size
        self.sent_bytes = 0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        self.sent_bytes += tensors[0].numel() * tensors[0].element_size()
        return self._post(tensors[0], (self._rank, peer), sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Message:
        return self._post(tensors[0], (peer, self._rank), sends=False)

    def _post(self, tensor: torch.Tensor, pair: tuple[int, int], sends: bool) -> Message:
        exchange = self._exchange
        message = Message(exchange, tensor)
        with exchange.changed:  # also around the lookups: of two threads one creates the queues of a pair
            mine, others = exchange.sends[pair], exchange.receives[pair]
            if not sends:
                mine, others = others, mine
            if others:
                other = others.popleft()
                message.match(other) if sends else other.match(message)
                exchange.changed.notify_all()
            else:
                mine.append(message)
        return message


def run_threads(
    schedule: CollectiveSchedule, tensors: list[torch.Tensor], segment_bytes: int, in_flight: int
) -> list[ThreadGroup]:
    """Run all ranks; raises what a rank raised."""
    exchange, errors = Exchange(), []
    groups = [ThreadGroup(exchange, rank, schedule.ranks) for rank in range(schedule.ranks)]

    def run_rank(rank: int) -> None:
        try:
            ScheduleRunner(schedule, groups[rank], segment_bytes=segment_bytes, in_flight=in_flight)(
                tensors[rank]
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not any(any(pending.values()) for pending in (exchange.sends, exchange.receives)), "left over"
    return groups


def build(op: str, algorithm: str, ranks: int, **options: int) -> CollectiveSchedule:
    grouped = {"ranks_per_node": min(2, ranks)} if algorithm == "hierarchical" else {}
    return build_collective(op, algorithm, ranks, **grouped, **options)


@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_every_schedule_gives_the_reference_result(op, algorithm):
    """Rank counts that are powers of two and not; chunks that are empty, in one segment, and in several."""
    for ranks in (1, 3, 5, 8):
        schedule = build(op, algorithm, ranks)
        for elements, segment_bytes, in_flight in ((0, 64, 1), (3, 64, 2), (101, 24, 1), (230, 80, 2)):
            inputs = make_inputs(schedule, elements, seed=ranks)
            tensors = [torch.from_numpy(array.copy()) for array in inputs]
            run_threads(schedule, tensors, segment_bytes, in_flight)
            wrong = wrong_chunks(schedule, elements, inputs, [tensor.numpy() for tensor in tensors])
            assert wrong == [], f"{ranks} ranks, {elements} elements"


def test_segments_change_neither_the_bytes_nor_the_result():
    """A ring on four ranks sends 2 (N - 1) / N of the tensor, in whole chunks and in segments."""
    schedule = build_collective("all_reduce", "ring", 4)
    for segment_bytes in (40, 1 << 20):
        tensors = [torch.arange(1000, dtype=torch.float32) * (rank + 1) for rank in range(4)]
        groups = run_threads(schedule, tensors, segment_bytes, 2)
        assert all(torch.equal(tensor, torch.arange(1000.0) * 10) for tensor in tensors)
        assert [group.sent_bytes for group in groups] == [6000] * 4


def test_a_schedule_that_is_not_correct_is_refused():
    schedule = build_collective("all_reduce", "ring", 3)
    broken = CollectiveSchedule(
        schedule.op,
        schedule.algorithm,
        3,
        None,
        schedule.blocks,
        1,
        (schedule.rows[0][:-1], *schedule.rows[1:]),
    )
    with pytest.raises(CheckFailedError, match="collective-not-proved"):
        ScheduleRunner(broken, ThreadGroup(Exchange(), 0, 3))


def test_bad_arguments():
    schedule = build_collective("all_to_all", "ring", 3)
    with pytest.raises(UserError, match=r"schedule\.ranks=3 .*\[api-argument\]"):
        ScheduleRunner(schedule, ThreadGroup(Exchange(), 0, 2))
    with pytest.raises(UserError, match=r"segment_bytes=0 .*\[api-argument\]"):
        ScheduleRunner(schedule, ThreadGroup(Exchange(), 0, 3), segment_bytes=0)
    with pytest.raises(UserError, match=r"numel\(\)=4 .*\[api-argument\]"):
        ScheduleRunner(schedule, ThreadGroup(Exchange(), 0, 3))(torch.zeros(4))
    with pytest.raises(UserError, match=r"contiguous.*\[api-argument\]"):
        ScheduleRunner(schedule, ThreadGroup(Exchange(), 0, 3))(torch.zeros(3, 3).t())
