"""Times the operations of ``meshwright probe``: on one device alone, or on all cores of a CPU at once.

Cores share memory bandwidth, caches and often execution units. An operation with the same work on every core
takes longer than alone, and this is how ranks run. On all cores, rank 0 measures; the others repeat the same
operation until it is done.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from meshwright.core.events import Listener
from meshwright.core.units import round_measured
from meshwright.plan.contract import read_plan
from meshwright.spec.job import Job
from meshwright.spec.probed import AttentionTime, GemmTime, OperationTimes
from meshwright.verify.bench import machine

TASK_FILE = "task.json"
"""The operations, in the run folder."""
COUNTER_FILE = "counters"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SLOT_BYTES = 8
POLL_S = 20e-6


@dataclass(frozen=True)
class Operations:
    """The operations to time."""

    precision: Literal["fp32", "bf16"]
    gemms: Sequence[tuple[int, int, int]]
    """Rows, output features, input features."""
    attention: Sequence[tuple[int, int, int, int, int]]
    """Batch size, query heads, key heads, head size, sequence length."""
    copy_elements: int
    optimizer_elements: int


def time_operations(
    device: torch.device,
    operations: Operations,
    job: Job,
    timer: machine.Timer,
    log: Callable[[str], None] = lambda text: None,
) -> OperationTimes:
    """Time single operations.

    Args:
        device: Runs them.
        operations: Their shapes.
        job: Its optimizer is timed.
        timer: Times each operation.
        log: Receives a line per operation.
    """
    precision, dtype = operations.precision, DTYPES[operations.precision]
    gemms, attention = [], []
    for sizes in operations.gemms:
        times = machine.time_linear(device, dtype, sizes, timer)
        gemms.append(GemmTime(precision, *sizes, *map(round_measured, times)))
        log(f"  linear layer of {describe_gemm(sizes, times)}")
    for shape in operations.attention:
        batch, heads, kv_heads, head_size, seq_len = shape
        both = machine.time_attention(device, dtype, (heads, kv_heads, head_size), (batch, seq_len), timer)
        attention.append(AttentionTime(precision, *shape, *map(round_measured, both)))
        rate = 7.0 * batch * heads * seq_len**2 * head_size / sum(both)
        log(f"  attention of {batch} x {seq_len}, {heads} heads of {head_size}: {rate / 1e12:.3g} TFLOP/s")
    return OperationTimes(
        gemms=tuple(gemms),
        attention=tuple(attention),
        copy_bytes_per_s=round_measured(machine.measure_copy(device, operations.copy_elements, timer)),
        optimizer_bytes_per_s=round_measured(
            machine.measure_adamw(device, job, operations.optimizer_elements, timer)
        ),
        launch_s=round_measured(machine.measure_launch(device, timer)),
    )


def describe_gemm(sizes: tuple[int, int, int], times: tuple[float, float, float]) -> str:
    """Shape of a linear layer and the rate of its three GEMMs (forward, input grad, weight grad)."""
    rows, columns, depth = sizes
    return f"{rows} x {columns} x {depth}: {6.0 * rows * columns * depth / sum(times) / 1e12:.3g} TFLOP/s"


class Cores:
    """The ranks of all cores: a counter each, in a file that all of them map."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        """Map the file, which has a zero per rank."""
        self.rank = rank
        with path.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), SLOT_BYTES * world_size)).cast("q")

    def align(self) -> None:
        """Wait until all ranks are here."""
        arrived = self._counters[self.rank] + 1
        self._counters[self.rank] = arrived
        while min(self._counters) < arrived:
            time.sleep(POLL_S)

    def is_measuring(self) -> bool:
        """Whether rank 0 has not gone on since the ranks were aligned."""
        return self._counters[0] == self._counters[self.rank]


@dataclass(frozen=True)
class AllCoresTimer:
    """Times a call on rank 0 while the other ranks repeat it; the median of CPU time counts."""

    cores: Cores
    seconds: float

    def time(self, call: Callable[[], object]) -> float:
        """Time of one call; 1 on the other ranks, whose times are not used."""
        machine.warm_up(call)
        self.cores.align()
        if self.cores.rank == 0:
            found = statistics.median(machine.list_cpu_times(call, self.seconds))
            self.cores.align()
            return found
        while self.cores.is_measuring():
            call()
        self.cores.align()
        return 1.0


@dataclass(frozen=True)
class Task:
    """The operations that all cores measure."""

    operations: Operations
    seconds: float
    """Per operation."""
    plans: list[str]
    """Files of one-process plans, whose steps are timed."""
    world_size: int

    def write(self, run_dir: Path) -> None:
        """Into the run folder, with the counters of the ranks."""
        (run_dir / TASK_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")
        (run_dir / COUNTER_FILE).write_bytes(bytes(SLOT_BYTES * self.world_size))

    @classmethod
    def read(cls, run_dir: Path) -> Task:
        """From the run folder."""
        table: dict[str, Any] = json.loads((run_dir / TASK_FILE).read_text(encoding="utf-8"))
        return cls(Operations(**table.pop("operations")), **table)


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Measure as one of the ranks on all cores; rank 0 reports. Returns the exit status."""
    folder, rank = Path(run_dir), int(os.environ["RANK"])
    task = Task.read(folder)
    torch.set_num_threads(1)
    cores, device = Cores(folder / COUNTER_FILE, rank, task.world_size), torch.device("cpu")
    plans = [read_plan(folder / name) for name in task.plans]
    timer = AllCoresTimer(cores, task.seconds)
    times = time_operations(device, task.operations, plans[0].job, timer)
    steps = []
    for plan in plans:
        cores.align()
        steps.append(machine.time_steps(plan, cores.align).step_s)
    if rank == 0 and listener is not None:
        listener({"event": "probed", "rank": 0, "operations": asdict(times), "step_s": steps})
    return 0
