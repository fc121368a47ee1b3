"""Measures collectives on real ranks of this machine: ours and the backend's, over its transports."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.core.errors import Problem, UserError, name_interruption, require_argument
from meshwright.core.events import Event
from meshwright.core.packages import require_packages
from meshwright.core.units import format_bytes, format_plural
from meshwright.launch.environment import prepare_environment
from meshwright.report.collective_curves import CollectiveCurve, CollectiveRow, draw_curves, list_curves
from meshwright.report.figure import save_figure
from meshwright.runs.measure import processor_name
from meshwright.runs.ranks import build_launch, require_devices
from meshwright.runs.reporter import Reporter
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.spec.cluster import count_cores, find_gpus, machine_memory_bytes
from meshwright.spec.job import Job
from meshwright.spec.load import build_job

ENTRY = "meshwright.verify.bench.collectives:run_rank"
TASK_FILE, JOB_FILE = "task.json", "job.toml"
PRELOAD = ("meshwright.launch.forkserver_preload", "torch.distributed", "meshwright.verify.bench.collectives")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24, 26, 28))
"""1 KiB to 256 MiB."""
ALGORITHMS = ("ring", "tree", "halving_doubling")
"""Our algorithms that are measured by default; each operation has some of them."""
BACKEND = "backend"
BUDGET_S = 120.0
MOST_RANKS = 64
MEMORY_SHARE = 0.5
"""Share of the free memory, for the tensors of all ranks."""


@dataclass(frozen=True)
class CollectiveBench:
    """Times of collectives on this machine."""

    rows: list[CollectiveRow]
    curves: list[CollectiveCurve]
    skipped: list[dict[str, Any]]
    """Operations and sizes that were not measured, with the reason."""
    machine: dict[str, Any]
    seconds: float
    date: str

    def draw(self, path: Path) -> None:
        """Draw time and bus bandwidth over the size. Needs the extra ``plots``."""
        ranks = format_plural(self.machine["ranks"], "rank")
        note = f"{ranks} on {self.machine['processor']}, {self.machine['cores']} cores, {self.date[:10]}"
        save_figure(draw_curves(self.curves, note), path)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright bench collectives --json``."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "curves": [curve.as_dict() for curve in self.curves],
            "skipped": self.skipped,
            "machine": self.machine,
            "seconds": self.seconds,
            "date": self.date,
        }


def bench_collectives(
    ranks: int | None,
    ops: Sequence[str],
    algorithms: Sequence[str] | None,
    sizes: Sequence[int],
    budget_s: float,
    cpu_only: bool,
    reporter: Reporter,
) -> CollectiveBench:
    """Measure.

    Args:
        ranks: Number of ranks; the GPUs or CPU cores of this machine, at least 2, if left out.
        ops: Operations; the usual five if empty.
        algorithms: Our algorithms; :data:`ALGORITHMS` if None. ``backend`` is always measured.
        sizes: Bytes of the larger tensor; 1 KiB to 256 MiB if empty.
        budget_s: Time for all; sizes that do not fit are skipped.
        cpu_only: Measure the CPU even if there are GPUs.
        reporter: Receives the progress.

    Raises:
        UserError: An argument does not fit, or there are too few GPUs.
        RunFailedError: A rank died.
    """
    require_packages(("torch", "run"), needed_for="bench collectives")
    started = time.monotonic()
    tree = build_bench_tree(ranks, cpu_only)
    job = build_job(tree)
    require_devices(job, job.layout.world_size)
    world, on_gpu = job.layout.world_size, job.cluster.device == "cuda"
    chosen = settle_algorithms(ops or OPS, algorithms, world)
    for size in sizes:
        require_argument(size > 0, "sizes", size, "must be at least 1 byte")
    require_argument(budget_s > 0, "budget_s", budget_s, "must be positive")
    wanted = sorted(set(sizes or SIZES))
    fitting = wanted if on_gpu else [size for size in wanted if _fits(size, world, "all_to_all" in chosen)]
    require_argument(bool(fitting), "sizes", wanted[0], "needs more than half of the free memory")
    prepare_environment(threads=1)
    task = {
        "algorithms": chosen,
        "transports": ["nccl"] if on_gpu else ["gloo", "shm"],
        "sizes": fitting,
        "started": started,
        "budget_s": budget_s,
    }
    rows, skipped = _run(tree, job, task, reporter)
    skipped += [
        {"op": op, "bytes": size, "reason": "memory"}
        for op in chosen
        for size in wanted
        if size not in fitting
    ]
    for one in skipped:
        reporter.warning(f"{one['op']} of {format_bytes(one['bytes'])} was not measured: {one['reason']}")
    machine = {
        "processor": processor_name(),
        "cores": count_cores(),
        "device": job.cluster.device,
        "device_name": job.cluster.device_name,
        "ranks": world,
        "load": os.getloadavg()[0],
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return CollectiveBench(rows, list_curves(rows), skipped, machine, time.monotonic() - started, date)


def build_bench_tree(ranks: int | None, cpu_only: bool) -> dict[str, Any]:
    """The tables of a job whose ranks are those of the benchmark."""
    gpus = [] if cpu_only else find_gpus()
    available = len(gpus) if len(gpus) > 1 else count_cores()
    world = min(MOST_RANKS, max(2, available)) if ranks is None else ranks
    require_argument(2 <= world <= MOST_RANKS, "ranks", world, f"must be 2 to {MOST_RANKS}")
    cluster: dict[str, Any] = {"preset": "local", "matmul_flops_per_s": 1.0}
    if len(gpus) < 2:
        cluster |= {"device": "cpu", "devices_per_node": max(world, available)}
    return {
        "name": "bench-collectives",
        "model": {"preset": "tiny"},
        "data": {"path": "-", "seq_len": 32},
        "train": {"steps": 1, "global_batch": world},
        "layout": {"dp_replicate": world, "micro_batch": 1},
        "cluster": cluster,
    }


def settle_algorithms(
    ops: Sequence[str], algorithms: Sequence[str] | None, ranks: int
) -> dict[str, list[str]]:
    """Our algorithms by operation; those that an operation does not have are left out.

    Raises:
        UserError: An operation or algorithm is unknown, or no operation has it.
    """
    for op in ops:
        if op not in list(Op):
            fix = f"Use {', '.join(Op)}"
            rule = "is not a collective operation"
            raise UserError(Problem("collective-op", rule, "ops", op, fix, is_argument=True))
    if algorithms is None:
        return {op: [name for name in ALGORITHMS if name in list_algorithms(op)] for op in ops}
    named = [name for name in algorithms if name != BACKEND]
    known = list(dict.fromkeys(name for op in ops for name in list_algorithms(op)))
    for name in named:
        if name not in known:
            rule, fix = f"is not an algorithm of {', '.join(ops)}", f"Use {', '.join((BACKEND, *known))}"
            raise UserError(Problem("collective-algorithm", rule, "algorithms", name, fix, is_argument=True))
        for op in ops:
            if name in list_algorithms(op):
                build_collective(op, name, ranks)  # raises if it needs groups
    return {op: [name for name in named if name in list_algorithms(op)] for op in ops}


def _fits(size: int, ranks: int, exchanges: bool) -> bool:
    copies = max(2, ranks) if exchanges else 2
    return size * copies * ranks <= MEMORY_SHARE * machine_memory_bytes()


def _run(
    tree: dict[str, Any], job: Job, task: dict[str, Any], reporter: Reporter
) -> tuple[list[CollectiveRow], list[dict[str, Any]]]:
    """Start the ranks; rows, and what the budget left out. The folder stays only if a rank died."""
    folder = Path(tempfile.mkdtemp(prefix="meshwright-bench-"))
    rows: list[CollectiveRow] = []
    skipped: list[dict[str, Any]] = []
    cells = len(task["algorithms"]) * len(task["sizes"])
    ranks = format_plural(job.layout.world_size, "rank")
    (folder / JOB_FILE).write_text(tomli_w.dumps(tree), encoding="utf-8")
    (folder / TASK_FILE).write_text(json.dumps(task), encoding="utf-8")
    with reporter.bar(cells) as show:
        show(f"{ranks}: starting", 0)
        done = 0

        def listen(event: Event) -> None:
            nonlocal done
            if event["event"] != "measured":
                return
            done += 1
            show(f"{event['op']}, {format_bytes(event['bytes'])}", done)
            rows.extend(CollectiveRow(**row) for row in event["rows"])
            if not event["rows"]:
                skipped.append({"op": event["op"], "bytes": event["bytes"], "reason": "budget"})

        stops = build_launch(ENTRY, job, folder, listen, preload=PRELOAD).run()
    shutil.rmtree(folder, ignore_errors=True)
    if stops:
        raise name_interruption(
            stops, Problem("bench-interrupted", "interrupted while measuring collectives")
        )
    return rows, skipped
