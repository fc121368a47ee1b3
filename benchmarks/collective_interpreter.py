"""All-reduce schedules that the interpreter runs against gloo's own all-reduce, over sockets, on real ranks.

All variants run in the same processes and alternate, so that other load on the machine affects all. Calls go
through the collective counter, as in a run. The time of a round is that of the slowest rank. ``ratio`` is the
throughput relative to gloo's: the median over rounds of gloo's time by the variant's, both of one round.
``CPU ms`` is the CPU time of a rank with all its threads, the median over rounds; other load on the machine
changes it less than the time.

    python benchmarks/collective_interpreter.py [--ranks 2] [--algorithm ring] [--size-mb 16 64]
        [--segment-mb 4] [--in-flight 2] [--rounds 40] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from meshwright.elastic.supervisor import Supervisor  # noqa: E402
from meshwright.measure.collective_counter import CollectiveCounter  # noqa: E402
from meshwright.parallel.collective_interpreter import (  # noqa: E402
    IN_FLIGHT,
    SEGMENT_BYTES,
    ScheduleRunner,
)
from meshwright.parallel.mesh import destroy_mesh, init_mesh  # noqa: E402
from meshwright.schedule.collective.build import build_collective  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402

JOB = """
[model]
preset = "tiny"
[data]
path = "unused"
seq_len = 32
[train]
steps = 1
global_batch = {ranks}
transport = "gloo"
[cluster]
device = "cpu"
devices_per_node = {ranks}
matmul_flops_per_s = 1e11
[layout]
dp_replicate = {ranks}
"""
BACKEND = "gloo"
MOST_BYTES = 6 << 30
"""Of all rounds of a size."""


def measure(run_dir: str, listener: Callable[[dict[str, Any]], None]) -> int:
    """One rank: times every size."""
    task = json.loads((Path(run_dir) / "task.json").read_text(encoding="utf-8"))
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(load_job(f"{run_dir}/job.toml"), counter)
    group, rows = mesh.group("dp_replicate"), []
    schedule = build_collective("all_reduce", task["algorithm"], mesh.world_size)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        BACKEND: lambda tensor: dist.all_reduce(tensor, group=group)
    }
    for segment_mb in task["segments"]:
        for in_flight in task["in_flight"]:
            runner = ScheduleRunner(
                schedule, group, segment_bytes=int(segment_mb * 2**20), in_flight=in_flight
            )
            calls[f"{segment_mb:g} MiB x {in_flight}"] = runner
    for size in task["sizes"]:
        tensor = torch.ones(size // 4)
        times: dict[str, list[float]] = {name: [] for name in calls}
        cpu: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + max(5, min(task["rounds"], MOST_BYTES // size))):
            for name, call in calls.items():
                tensor.fill_(1.0)
                dist.barrier(group=group)
                begin, used = time.perf_counter(), time.process_time()
                call(tensor)
                spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                cpu[name].append(time.process_time() - used)
                assert tensor[0] == tensor[-1] == mesh.world_size, f"{name}: wrong sum"
                dist.all_reduce(spent, dist.ReduceOp.MAX, group=group)
                times[name].append(spent.item())
        base = times[BACKEND][1:]
        for name, found in times.items():
            ratio = statistics.median(ours / theirs for ours, theirs in zip(base, found[1:], strict=True))
            row = {"bytes": size, "variant": name, "time_s": statistics.median(found[1:]), "ratio": ratio}
            rows.append({**row, "cpu_s": statistics.median(cpu[name][1:]), "rounds": len(base)})
    if mesh.rank == 0:
        listener({"event": "measured", "rank": 0, "rows": rows})
    destroy_mesh(mesh)
    return 0


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks; returns a row per size and variant."""
    events: list[dict[str, Any]] = []
    task = {
        "algorithm": options.algorithm,
        "sizes": [size << 20 for size in options.size_mb],
        "segments": options.segment_mb,
        "in_flight": options.in_flight,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB.format(ranks=options.ranks), encoding="utf-8")
        (Path(folder) / "task.json").write_text(json.dumps(task), encoding="utf-8")
        entry = "collective_interpreter:measure"
        Supervisor(entry, Path(folder), options.ranks, 0, 10.0, events.append).run()
    (measured,) = [event for event in events if event["event"] == "measured"]
    rows: list[dict[str, Any]] = measured["rows"]
    return rows


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--algorithm", default="ring")
    parser.add_argument("--size-mb", type=int, nargs="+", default=[16, 64], help="in MiB")
    parser.add_argument("--segment-mb", type=float, nargs="+", default=[SEGMENT_BYTES / 2**20])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[IN_FLIGHT])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = run(options)
    if options.json:
        sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n")
        return
    sys.stdout.write(f"{'MiB':>5}  {'variant':<14}{'ms':>9}{'ratio':>7}{'CPU ms':>9}\n")
    for row in rows:
        line = f"{row['bytes'] >> 20:>5}  {row['variant']:<14}{row['time_s'] * 1e3:>9.1f}"
        sys.stdout.write(f"{line}{row['ratio']:>7.2f}{row['cpu_s'] * 1e3:>9.1f}\n")


if __name__ == "__main__":
    main()
