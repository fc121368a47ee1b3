"""Hierarchical all-reduce against flat rings, on two nodes of two ranks with a slow network between them.

The nodes are network namespaces of this machine, joined by a bridge; ``tc tbf`` limits what each node sends.
All algorithms run in the same processes and alternate. ``hierarchical`` is what
``train.all_reduce=hierarchical`` runs: collectives of gloo inside and between the nodes, in chunks. The
interpreter runs schedules over gloo's point-to-point messages. ``gloo`` is its own all-reduce, a ring. The
time of a round is that of the slowest rank; the figure is the median. ``sent`` is what the busiest node sent
over its network interface, relative to the tensor.

With ``--train`` a job is trained on the same nodes instead, by both settings of ``train.all_reduce``; the
figure is the median step. Needs root, ``ip`` and ``tc``.

    python benchmarks/hierarchical_all_reduce.py [--mbit 100] [--size-mb 4] [--rounds 7] [--train] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
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
from slow_nodes import INTERFACE, NODES, slow_nodes  # noqa: E402

from meshwright.layout.axes import INTER_NODE_AXIS, INTRA_NODE_AXIS  # noqa: E402
from meshwright.layout.hierarchy import Hierarchy  # noqa: E402
from meshwright.parallel.collective_interpreter import ScheduleRunner  # noqa: E402
from meshwright.parallel.hierarchical_all_reduce import HierarchicalAllReduce  # noqa: E402
from meshwright.parallel.mesh import Mesh  # noqa: E402
from meshwright.runs.faults.checks.network_nodes import require_namespaces, result_of  # noqa: E402
from meshwright.schedule.collective.build import build_collective  # noqa: E402
from meshwright.schedule.collective.phases import find_phases  # noqa: E402

RANKS_PER_NODE = 2
RANKS = NODES * RANKS_PER_NODE
STORE_PORT = 29600
SEGMENT_BYTES = 128 << 10
"""Of the hierarchical schedule: a segment takes 10 ms at 100 Mbit/s, much more than a call. Rings are not
faster with it."""
JOB = """
name = "hierarchical"
[model]
preset = "demo-2m"
[data]
path = "{corpus}"
seq_len = 32
[train]
steps = {steps}
global_batch = 4
[checkpoint]
dir = "{folder}/checkpoints-{name}"
[cluster]
device = "cpu"
devices_per_node = {ranks_per_node}
nic_bytes_per_s = {nic_bytes_per_s}
nic_latency_s = 1e-4
matmul_flops_per_s = 1e11
[layout]
dp_replicate = {ranks}
micro_batch = 1
"""


def run_rank(rank: int, address: str, elements: int, rounds: int) -> None:
    """One rank: times all algorithms, and prints the figures on rank 0."""
    store = dist.TCPStore(address, STORE_PORT, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = dist.new_group(list(range(RANKS)))
    hierarchical = build_collective("all_reduce", "hierarchical", RANKS, ranks_per_node=RANKS_PER_NODE)
    phases = find_phases(hierarchical)

    def join(groups: tuple[tuple[int, ...], ...]) -> Any:
        made = [(members, dist.new_group(list(members))) for members in groups]
        return next(group for members, group in made if rank in members)

    groups = {INTRA_NODE_AXIS: join(phases.inside), INTER_NODE_AXIS: join(phases.between)}
    mesh = Mesh(rank, RANKS, torch.device("cpu"), groups=groups)
    in_phases = HierarchicalAllReduce(
        mesh, Hierarchy(hierarchical, phases.inside, phases.between), [elements]
    )
    interleaved = [k + i * RANKS_PER_NODE for k in range(RANKS_PER_NODE) for i in range(NODES)]
    flat = build_collective("all_reduce", "ring", RANKS)
    mixed = build_collective("all_reduce", "ring", RANKS, order=interleaved)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "hierarchical": lambda tensor: in_phases.start(tensor).wait(),
        "hierarchical, interpreter": ScheduleRunner(hierarchical, world, segment_bytes=SEGMENT_BYTES),
        "ring in rank order": ScheduleRunner(flat, world),
        "ring in interleaved order": ScheduleRunner(mixed, world),
        "gloo": lambda tensor: dist.all_reduce(tensor, group=world),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    sent: dict[str, float] = {}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            tensor = torch.full((elements,), float(rank))
            dist.barrier(group=world)
            before, begin = read_sent_bytes(), time.perf_counter()
            call(tensor)
            figures = [time.perf_counter() - begin]
            dist.barrier(group=world)
            figures.append((read_sent_bytes() - before) / (elements * 4))
            assert tensor.eq(sum(range(RANKS))).all(), f"{name}: wrong sum"
            slowest = torch.tensor(figures, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=world)
            times[name].append(slowest[0].item())
            sent[name] = slowest[1].item()
    if rank == 0:
        rows = [
            {"algorithm": name, "time_s": statistics.median(found[1:]), "sent": sent[name]}
            for name, found in times.items()
        ]
        sys.stdout.write(json.dumps(rows) + "\n")
    dist.destroy_process_group()


def read_sent_bytes() -> int:
    """Bytes that this node has sent to the other one."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text(encoding="ascii"))


def measure(mbit: float, size: int, rounds: int) -> list[dict[str, Any]]:
    """Run all ranks; returns a row per algorithm."""
    elements = size // 4 // RANKS_PER_NODE * RANKS_PER_NODE
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
    with tempfile.TemporaryDirectory() as folder, slow_nodes(mbit, Path(folder)) as nodes:
        ranks = []
        for rank in range(RANKS):
            # A mount namespace of its own sees the interface under /sys.
            command = ["ip", "netns", "exec", nodes.names[rank // RANKS_PER_NODE], sys.executable, __file__]
            command += ["--rank", str(rank), "--size-mb", str(elements * 4 / 1e6), "--rounds", str(rounds)]
            ranks.append(
                subprocess.Popen(
                    [*command, "--address", nodes.address(0)], stdout=subprocess.PIPE, env=environment
                )
            )
        try:
            output = ranks[0].communicate(timeout=540)[0]
            statuses = [process.wait(timeout=30) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(statuses):
        raise SystemExit(f"a rank failed: {statuses}")
    rows: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
    return rows


def train(mbit: float, steps: int) -> list[dict[str, Any]]:
    """Train on both nodes, by both settings in turn; returns their median steps."""
    found: dict[str, list[float]] = {"backend": [], "hierarchical": []}
    for turn in range(2):
        for setting in found:
            with tempfile.TemporaryDirectory() as name, slow_nodes(mbit, Path(name)) as nodes:
                folder = Path(name)
                (folder / "corpus").mkdir()
                text = "".join(f"line {line} of a small corpus\n" for line in range(4000))
                (folder / "corpus" / "text.txt").write_text(text, encoding="utf-8")
                job = folder / "job.toml"
                nic = mbit * 1e6 / 8 / RANKS_PER_NODE  # devices of a node share its interface
                job.write_text(
                    JOB.format(
                        corpus=folder / "corpus", folder=folder, name=turn, steps=steps, ranks=RANKS,
                        ranks_per_node=RANKS_PER_NODE, nic_bytes_per_s=nic,
                    ),
                    encoding="utf-8",
                )  # fmt: skip
                supervisor = nodes.train(job, f"train.all_reduce={setting}")
                nodes.join(1)
                result = result_of(supervisor)
                assert result["audit_ok"], "calls or bytes differ from the plan"
                events = nodes.events()
                found[setting] += [
                    event["step_s"]
                    for event in events
                    if event["event"] == "step" and event["rank"] == 0 and event["step"] > 3
                ]
    return [{"all_reduce": name, "step_s": statistics.median(times)} for name, times in found.items()]


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="rate at which a node sends")
    parser.add_argument("--size-mb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--train", action="store_true", help="train a job instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.address, int(options.size_mb * 1e6) // 4, options.rounds)
        return
    require_namespaces()
    if options.train:
        rows = train(options.mbit, steps=options.rounds + 3)
        first, key, of = rows[-1], "step_s", "all_reduce"
    else:
        rows = measure(options.mbit, int(options.size_mb * 1e6), options.rounds)
        first, key, of = rows[0], "time_s", "algorithm"
    for row in rows:
        row["ratio"] = row[key] / first[key]
    if options.json:
        sys.stdout.write(json.dumps({"mbit": options.mbit, "rows": rows}, indent=1) + "\n")
        return
    for row in rows:
        sent = f"  sent {row['sent']:.2f} S" if "sent" in row else ""
        sys.stdout.write(f"{row[of]:<27}{row[key] * 1e3:>8.0f} ms{row['ratio']:>7.2f} x{sent}\n")


if __name__ == "__main__":
    main()
