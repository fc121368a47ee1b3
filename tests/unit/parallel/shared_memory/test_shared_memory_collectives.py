"""Collectives over a channel, with a thread for each rank and small slots."""

from __future__ import annotations

import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from meshwright.layout.shared_memory import LINE, Region
from meshwright.parallel.shared_memory import collectives
from meshwright.parallel.shared_memory.channel import Channel, PeerLostError, Peers
from meshwright.parallel.shared_memory.reduction import AVG, MAX, MIN, PRODUCT, SUM, build_reduce, can_reduce

SLOT = 4096
SIZES = (0, 1, 13, 1024, 1025, 20_011)
"""Elements: none, one, odd numbers, a whole slot, one more, many rounds."""


class Ranks:
    """The channels of all ranks of a group in this process."""

    def __init__(self, size: int) -> None:
        region = Region(tuple(range(size)), 0, SLOT)
        memory = mmap.mmap(-1, region.end)
        self.peers = Peers({})
        self.channels = [Channel(memory, region, rank, self.peers, 30.0, spin=False) for rank in range(size)]

    def run(self, call, signatures=None):
        """Call a function with each rank's channel, at the same time; returns the results by rank."""

        def work(rank):
            self.channels[rank].begin(signatures[rank] if signatures else 1)
            return call(rank, self.channels[rank])

        with ThreadPoolExecutor(len(self.channels)) as pool:
            return list(pool.map(work, range(len(self.channels))))


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 3, (numel,), generator=generator).to(dtype)


def reduce_in_order(parts: list[torch.Tensor], op: int) -> torch.Tensor:
    """The reference: rank by rank; 16-bit numbers in float32."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype in (torch.bfloat16, torch.float16) else part for part in parts]
    result = wide[0].clone()
    for part in wide[1:]:
        if op in (SUM, AVG):
            result = result + part
        elif op == PRODUCT:
            result = result * part
        else:
            result = (torch.minimum if op == MIN else torch.maximum)(result, part)
    return (result / len(parts) if op == AVG else result).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", SIZES)
def test_all_reduce_adds_in_rank_order_on_every_rank(size, numel, monkeypatch):
    monkeypatch.setattr(collectives, "FLAT_BYTES", 2048)  # both methods, by size
    ranks = Ranks(size)
    tensors = [values_of(rank, numel, torch.float32) for rank in range(size)]
    expected = reduce_in_order(tensors, SUM)
    reduce = build_reduce(torch.float32, SUM)
    ranks.run(lambda rank, channel: collectives.all_reduce(channel, as_bytes(tensors[rank]), reduce))
    assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("op", [SUM, AVG, PRODUCT, MIN, MAX])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8],
)
def test_dtypes_and_operations(dtype, op):
    if not can_reduce(dtype, op):
        assert op != SUM  # the backend runs it
        return
    ranks, size, numel = Ranks(3), 3, 3001
    tensors = [values_of(rank, numel, dtype) for rank in range(size)]
    expected = reduce_in_order(tensors, op)
    reduce = build_reduce(dtype, op)
    ranks.run(lambda rank, channel: collectives.all_reduce(channel, as_bytes(tensors[rank]), reduce))
    assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(size, numel, in_place):
    ranks, reduce = Ranks(size), build_reduce(torch.float32, SUM)
    sources = [values_of(rank, numel * size, torch.float32) for rank in range(size)]
    expected = reduce_in_order(sources, SUM).view(size, numel)

    def call(rank, channel):
        parts = sources[rank].view(size, numel)
        output = parts[rank] if in_place else torch.empty(numel)
        collectives.reduce_scatter(channel, as_bytes(output), [as_bytes(part) for part in parts], reduce)
        return output

    outputs = ranks.run(call)
    assert all(torch.equal(output, expected[rank]) for rank, output in enumerate(outputs))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", SIZES)
def test_all_gather_and_broadcast(size, numel):
    ranks = Ranks(size)
    sources = [values_of(rank, numel, torch.int16) for rank in range(size)]
    outputs = [torch.empty(size, numel, dtype=torch.int16) for _ in range(size)]

    def gather(rank, channel):
        rows = [as_bytes(row) for row in outputs[rank]]
        collectives.all_gather(channel, rows, as_bytes(sources[rank]))

    ranks.run(gather)
    assert all(torch.equal(output, torch.stack(sources)) for output in outputs)
    root = size - 1
    wanted = sources[root].clone()
    ranks.run(lambda rank, channel: collectives.broadcast(channel, as_bytes(sources[rank]), root))
    assert all(torch.equal(source, wanted) for source in sources)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", SIZES)
def test_all_to_all_of_uneven_parts(size, numel):
    """Rank r sends (r + 2 s) mod size times ``numel`` elements to rank s; some parts are empty."""
    ranks = Ranks(size)
    sent = [
        [values_of(r * size + s, numel * ((r + 2 * s) % size), torch.float32) for s in range(size)]
        for r in range(size)
    ]
    got = [[torch.empty_like(sent[s][r]) for s in range(size)] for r in range(size)]

    def call(rank, channel):
        outputs, parts = [as_bytes(t) for t in got[rank]], [as_bytes(t) for t in sent[rank]]
        collectives.all_to_all(channel, outputs, parts)

    ranks.run(call)
    assert all(torch.equal(got[r][s], sent[s][r]) for r in range(size) for s in range(size))


def test_many_collectives_of_different_kinds_in_a_row():
    """A rank that is ahead does not overwrite what another one still reads."""
    ranks, size, reduce = Ranks(3), 3, build_reduce(torch.int64, SUM)

    def call(rank, channel):
        wrong = 0
        for step in range(300):
            numel = (step * 37) % 1500
            values = torch.full((numel,), rank + step)
            collectives.all_reduce(channel, as_bytes(values), reduce)
            wrong += int((values != 3 * step + 3).sum())
            if step % 3 == rank:
                collectives.barrier(channel)
            else:
                collectives.barrier(channel)
            sent = (
                torch.full((numel,), step) if rank == step % size else torch.zeros(numel, dtype=torch.int64)
            )
            collectives.broadcast(channel, as_bytes(sent), step % size)
            wrong += int((sent != step).sum())
        return wrong

    assert ranks.run(call) == [0, 0, 0]


@pytest.mark.parametrize("begin", [2**31 - 40, 2**32 - 40])
def test_counters_wrap_around(begin):
    """After 2^32 exchanges counters begin at 0; waits in the kernel, too."""
    ranks, reduce = Ranks(3), build_reduce(torch.int64, SUM)
    for rank, channel in enumerate(ranks.channels):
        channel._count = begin
        channel._words[rank * (LINE // 4)] = begin

    def call(rank, channel):
        wrong = 0
        for step in range(60):
            if step % 3 == rank:
                time.sleep(0.001)  # the others wait in the kernel
            values = torch.full((600,), rank + step)
            collectives.all_reduce(channel, as_bytes(values), reduce)
            wrong += int((values != 3 * step + 3).sum())
        return wrong, channel._count

    assert ranks.run(call) == [(0, begin + 120)] * 3


def test_different_collectives_raise_on_all_ranks():
    ranks = Ranks(2)

    def call(rank, channel):
        with pytest.raises(RuntimeError, match="called different collectives"):
            collectives.barrier(channel)

    ranks.run(call, signatures=[1, 2])


def test_all_to_all_with_sizes_that_do_not_match_raises_on_all_ranks():
    """Rank 2 expects more from rank 1 than that sends. Rank 0 raises, too."""
    ranks = Ranks(3)
    one, two = torch.zeros(1), torch.zeros(2)

    def call(rank, channel):
        outputs = [two.clone() if (rank, i) == (2, 1) else one.clone() for i in range(3)]
        with pytest.raises(RuntimeError, match=r"rank 1 of the group sends 4 bytes to rank 2 .* expects 8"):
            collectives.all_to_all(channel, [as_bytes(t) for t in outputs], [as_bytes(one)] * 3)
        return rank

    assert ranks.run(call) == [0, 1, 2]


def test_an_abort_ends_a_wait():
    ranks = Ranks(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(collectives.barrier, ranks.channels[0])
        ranks.peers.aborted = True
        with pytest.raises(PeerLostError, match="told to leave"):
            waiting.result(timeout=30)


def test_a_timeout_ends_a_wait():
    ranks = Ranks(2)
    ranks.channels[0].begin(1, timeout_s=0.0)
    with pytest.raises(PeerLostError, match="Timed out"):
        collectives.barrier(ranks.channels[0])


def test_a_process_that_is_gone_before_it_is_watched():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(PeerLostError, match="ended while the ranks joined"):
        Peers({1: pid})


def test_groups_that_wait_at_once_look_at_their_processes_one_at_a_time():
    """``select.poll`` raises an error if two threads call it at the same time."""
    watched = Peers({1: os.getppid()})
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(lambda: [watched.check((0, 1)) for _ in range(2000)]) for _ in range(4)]:
            future.result()
    watched.close()


def test_a_wait_that_signals_interrupt_ends_at_the_deadline_of_the_call():
    """Each signal ends a futex wait: liveness and deadline are judged by the clock."""
    ranks = Ranks(2)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        ranks.channels[0].begin(1, timeout_s=0.3)
        with pytest.raises(PeerLostError, match=r"Timed out after 0\.3 s"):
            collectives.barrier(ranks.channels[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
