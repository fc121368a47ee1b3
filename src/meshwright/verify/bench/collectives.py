"""One rank of ``meshwright bench collectives``: times of collectives, by algorithm and transport.

All variants of a size alternate in the same processes, so that other load on the machine affects all of them
equally. A round has several calls in a row if they are small, because ranks leave the barrier before it at
different times. The time of a round is that of its slowest rank; the figure is the median over the rounds,
per call. Linux counts how long ranks were ready and had no core; without that time, other load hardly
matters.

The first call of each variant is checked: it must give the right values.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.events import Listener
from meshwright.measure.collective_counter import CollectiveCounter, Transport
from meshwright.measure.own_time import ProcessTime, estimate_uncontended_s, read_process_time
from meshwright.parallel.collective_interpreter import ScheduleRunner
from meshwright.parallel.collectives import all_gather_into, reduce_scatter_into
from meshwright.parallel.mesh import Mesh, destroy_mesh, init_mesh
from meshwright.schedule.collective.build import build_collective
from meshwright.schedule.collective.ops import REDUCING, Op
from meshwright.spec.load import load_job

TASK_FILE, JOB_FILE = "task.json", "job.toml"
BACKEND = "backend"
"""The algorithm of calls that the backend, or the transport in its place, runs."""
SHM_OPS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.BROADCAST, Op.ALL_TO_ALL)
"""Operations that the shared-memory transport runs."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
"""Rounds of one size, after a round that is not counted."""
CALLS = 40
"""Calls of a round, if they are small."""
BYTES_PER_ROUND = 4 << 20
"""Moved by a round at most, if it has several calls."""
LARGE_BYTES = 16 << 20
"""A size of this many bytes gets twice the time of a small one."""
ELEMENT_BYTES = 4


class Variant(NamedTuple):
    """One curve."""

    algorithm: str
    transport: str


@dataclass(frozen=True)
class Task:
    """The variants to measure."""

    algorithms: dict[str, list[str]]
    """By operation, beside the backend's own."""
    transports: list[str]
    sizes: list[int]
    started: float
    """On the monotonic clock of this machine."""
    budget_s: float

    @classmethod
    def read(cls, run_dir: str) -> Task:
        """From the run folder."""
        return cls(**json.loads((Path(run_dir) / TASK_FILE).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Call:
    """A collective on tensors of one size."""

    run: Callable[[], object]
    size_bytes: int
    """The larger of input and output."""
    sources: tuple[Tensor, ...]
    """Tensors that it reads."""
    result: Tensor | None
    """The part that it writes; None on a rank that gets nothing."""
    expected: float
    """What it writes if all sources are 1."""

    def check(self) -> None:
        """Run it once, on ones."""
        if self.result is not None:
            self.result.fill_(0.0)
        for source in self.sources:
            source.fill_(1.0)
        self.run()
        wrong = 0 if self.result is None else int((self.result != self.expected).sum())
        assert not wrong, f"{wrong} elements of a collective of {self.size_bytes} bytes are wrong"


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Measure as this rank; rank 0 reports each size. Returns the exit status."""
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(load_job(f"{run_dir}/{JOB_FILE}"), counter)
    bench = _Bench(Task.read(run_dir), mesh, counter)
    transport = counter.transport
    for event in bench.measure():
        if mesh.rank == 0 and listener is not None:
            listener({"event": "measured", "rank": 0, **event})
    counter.transport = transport
    destroy_mesh(mesh)
    return 0


class _Bench:
    """All operations and sizes, on one rank."""

    def __init__(self, task: Task, mesh: Mesh, counter: CollectiveCounter) -> None:
        self._task, self._counter = task, counter
        self._group, self._device = mesh.group("dp_replicate"), mesh.device
        self._transports: dict[str, Transport | None] = {"nccl": None, "gloo": None}
        if counter.transport is not None:
            self._transports["shm"] = counter.transport
        counter.transport = None  # barriers and times go through the backend

    def measure(self) -> Iterator[dict[str, Any]]:
        """Rows of each operation and size; none of a size that the budget leaves no time for."""
        cells = [(op, size) for op in self._task.algorithms for size in self._task.sizes]
        weights = [1.0 + size / LARGE_BYTES for _, size in cells]
        spent_s = self._max_over_ranks([time.monotonic() - self._task.started])[0]
        last: tuple[str, int, float] | None = None  # operation, size, seconds of one round
        for number, (op, size) in enumerate(cells):
            left_s = self._task.budget_s - spent_s
            rows: list[dict[str, Any]] = []
            if left_s > self._least_s(op, size, last):
                begin_s, share_s = spent_s, left_s * weights[number] / sum(weights[number:])
                rows, spent_s = self._measure_size(Op(op), size, spent_s + share_s)
                last = op, size, (spent_s - begin_s) / (rows[0]["rounds"] + 2)
            yield {"op": op, "bytes": size, "rows": rows}

    @staticmethod
    def _least_s(op: str, size: int, last: tuple[str, int, float] | None) -> float:
        """Time of the fewest rounds of a size, from the previous size; 0 if it is the first."""
        if last is None or last[0] != op or size * 2 <= BYTES_PER_ROUND:
            return 0.0
        return (LEAST_ROUNDS + 2) * last[2] * min(size / last[1], size / BYTES_PER_ROUND)

    def _measure_size(self, op: Op, size: int, until_s: float) -> tuple[list[dict[str, Any]], float]:
        """Rows of all variants, and the time since the start of the benchmark."""
        variants = self._list_variants(op)
        pool = torch.zeros(count_pool(op, size, self._group.size()), device=self._device)
        calls = {variant: build_call(op, variant.algorithm, size, self._group, pool) for variant in variants}
        for variant, call in calls.items():
            self._counter.transport = self._transports[variant.transport]
            call.check()
        pool.zero_()  # sums of many calls stay finite
        times: dict[Variant, list[tuple[float, ProcessTime]]] = {variant: [] for variant in variants}
        repeat, rounds, spent_s = max(1, min(CALLS, BYTES_PER_ROUND // size)), 0, 0.0
        while rounds <= LEAST_ROUNDS or (rounds <= MOST_ROUNDS and spent_s < until_s):
            at = rounds % len(variants)
            order = variants[at:] + variants[:at]
            found = [self._time(variant, calls[variant], repeat) for variant in order]
            flat = [second for three in found for second in three]
            *flat, spent_s = self._max_over_ranks([*flat, time.monotonic() - self._task.started])
            for number, variant in enumerate(order):
                wall_s, cpu_s, queued_s = (value / repeat for value in flat[3 * number : 3 * number + 3])
                times[variant].append((wall_s, ProcessTime(cpu_s, queued_s)))
            rounds += 1
        return [
            {
                "op": op.value,
                **variant._asdict(),
                "ranks": self._group.size(),
                "bytes": calls[variant].size_bytes,
                "time_s": statistics.median(wall for wall, _ in found[1:]),
                "uncontended_s": estimate_uncontended_s(*zip(*found[1:], strict=True)),
                "rounds": len(found) - 1,
            }
            for variant, found in times.items()
        ], spent_s

    def _list_variants(self, op: Op) -> list[Variant]:
        """Schedules send through the backend: the shared-memory transport has no sends."""
        named = [name for name in self._task.transports if name in self._transports]
        ours = [Variant(name, at) for name in self._task.algorithms[op] for at in named if at != "shm"]
        own = [Variant(BACKEND, at) for at in named if at != "shm" or op in SHM_OPS]
        return own + ours

    def _time(self, variant: Variant, call: Call, repeat: int) -> tuple[float, float, float]:
        """Seconds of some calls on this rank, its CPU time and its time in run queues."""
        self._counter.transport = None
        dist.barrier(group=self._group)
        self._counter.transport = self._transports[variant.transport]
        earlier, begin = read_process_time(), self._now()
        for _ in range(repeat):
            call.run()
        return self._now() - begin, *read_process_time().since(earlier)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _max_over_ranks(self, seconds: Sequence[float]) -> list[float]:
        """The times of the slowest rank, the same on all ranks."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        self._counter.transport = None
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values.tolist()


def count_elements(size: int, ranks: int) -> int:
    """Elements of the larger tensor: about this many bytes, and a multiple of the ranks."""
    return max(1, size // ELEMENT_BYTES // ranks) * ranks


def count_pool(op: Op, size: int, ranks: int) -> int:
    """Elements of the tensors of any call of an operation: all calls of a size share their memory."""
    copies = max(2, ranks) if op is Op.ALL_TO_ALL else 2
    return count_elements(size, ranks) * copies


def build_call(op: Op, algorithm: str, size: int, group: dist.ProcessGroup, pool: Tensor) -> Call:
    """A collective whose larger tensor has about this many bytes. The root is rank 0.

    Args:
        op: The operation.
        algorithm: ``backend``, or one of ours.
        size: Bytes.
        group: The ranks.
        pool: Memory for the tensors.
    """
    elements = count_elements(size, group.size())
    if algorithm != BACKEND:
        return _build_schedule_call(op, algorithm, elements, group, pool)
    large = pool[:elements]
    small = pool[elements : elements + elements // group.size()]
    output = pool[elements : 2 * elements]
    run, sources, result = _list_backend_calls(group, large, small, output)[op]
    expected = float(group.size()) if op in REDUCING else 1.0
    return Call(run, elements * ELEMENT_BYTES, sources, result, expected)


def _list_backend_calls(
    group: dist.ProcessGroup, large: Tensor, small: Tensor, output: Tensor
) -> dict[Op, tuple[Callable[[], object], tuple[Tensor, ...], Tensor | None]]:
    """Each operation: its call, what the rank sends, and what it gets."""
    is_root, parts = group.rank() == 0, list(large.chunk(group.size()))
    at_root = large if is_root else None
    of_root, listed = ((large,), parts) if is_root else ((), None)
    return {
        Op.ALL_REDUCE: (lambda: dist.all_reduce(large, group=group), (large,), large),
        Op.REDUCE: (lambda: dist.reduce(large, group=group, group_dst=0), (large,), at_root),
        Op.BROADCAST: (lambda: dist.broadcast(large, group=group, group_src=0), of_root, large),
        Op.REDUCE_SCATTER: (lambda: reduce_scatter_into(small, large, group=group), (large,), small),
        Op.ALL_GATHER: (lambda: all_gather_into(large, small, group=group), (small,), large),
        Op.GATHER: (lambda: dist.gather(small, listed, group=group, group_dst=0), (small,), at_root),
        Op.SCATTER: (lambda: dist.scatter(small, listed, group=group, group_src=0), of_root, small),
        Op.ALL_TO_ALL: (lambda: dist.all_to_all_single(output, large, group=group), (large,), output),
    }


def _build_schedule_call(
    op: Op, algorithm: str, elements: int, group: dist.ProcessGroup, pool: Tensor
) -> Call:
    """The same by a schedule of ours, over the sends and receives of the backend."""
    ranks, rank = group.size(), group.rank()
    schedule = build_collective(op, algorithm, ranks)
    buffer = pool[: schedule.buffer_elements(elements)]
    runner = ScheduleRunner(schedule, group)
    own = buffer.chunk(ranks)[rank]  # the rank's block; of an all-to-all, its input
    sources: tuple[Tensor, ...] = (own,) if op in (Op.ALL_GATHER, Op.GATHER, Op.ALL_TO_ALL) else (buffer,)
    result: Tensor | None = own if op in (Op.SCATTER, Op.REDUCE_SCATTER) else buffer
    if op is Op.ALL_TO_ALL:  # part r of the input of every rank is for rank r
        result = buffer.view(ranks, ranks, -1)[:, rank]
    if rank != 0:
        sources = () if op in (Op.BROADCAST, Op.SCATTER) else sources
        result = None if op in (Op.GATHER, Op.REDUCE) else result
    expected = float(ranks) if op in REDUCING else 1.0
    return Call(lambda: runner(buffer), elements * ELEMENT_BYTES, sources, result, expected)
