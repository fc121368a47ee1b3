"""Rank placement on slow links: the placement that the plan advises against the worst one, by real training.

Two nodes of two ranks are network namespaces of this machine, joined by a bridge. ``tc tbf`` limits what each
node sends. Each row is one job. ``meshwright train`` runs it with each placement in turn: the supervisor and
its agent on node 0, ``meshwright agent`` on node 1. Where the plan does not advise rank order, rank order is
run, too. The figure is the median step of a run, without its first two. Ratios are those of runs next to each
other; the result is the median over all rounds. All runs must audit clean, and have equal losses up to
rounding.

The worst placement is that of all 24 with the longest predicted step. With DDP on four ranks the bound is 2:
gloo's ring crosses between the nodes four times instead of twice, with the same bytes each.

    python benchmarks/placement.py [--mbit 100] [--rounds 3] [--steps 12] [--rows dp4 tp2-dp2] [--json]

Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from slow_nodes import NODES, slow_nodes

from meshwright.layout.placement import Slots, normalize_slots
from meshwright.plan.build import build_plan
from meshwright.plan.search.placement import PlacementSearch
from meshwright.runs.faults.checks.network_nodes import require_namespaces, result_of
from meshwright.spec.load import load_job

PER_NODE = 2
RANKS = NODES * PER_NODE
JOB = """
[model]
num_layers = 4
hidden_size = 256
num_heads = 8
num_kv_heads = 8
tied_embeddings = true
ffn_size = 1024
vocab_size = 320
[data]
path = "builtin:python-stdlib"
seq_len = 32
tokenizer = "byte"
cache = "{cache}"
[train]
steps = {steps}
global_batch = 4
[checkpoint]
asynchronous = false
[cluster]
device = "cpu"
devices_per_node = {per_node}
nic_bytes_per_s = {nic_bytes_per_s}
nic_latency_s = 2e-4
matmul_flops_per_s = 1e11
"""
ROWS = {
    "dp4": ("layout.dp_replicate=4",),
    "tp2-dp2": ("layout.tp=2", "layout.dp_replicate=2"),
}
LOSS_TOLERANCE = 1e-5


def find_worst(file: Path, overrides: Sequence[str]) -> Slots:
    """The placement with the longest predicted step, of all."""
    plan, _ = build_plan(load_job(str(file), [f"cluster.nodes={NODES}", *overrides]))
    every = np.array(list(itertools.permutations(range(RANKS))))
    steps = PlacementSearch(plan.job, plan.micro_batches).judge(every)
    return normalize_slots(int(slot) for slot in every[int(np.argmax(steps))])


def predict(file: Path, overrides: Sequence[str]) -> tuple[Slots, float]:
    """The planned placement, and its predicted step."""
    plan, _ = build_plan(load_job(str(file), [f"cluster.nodes={NODES}", *overrides]))
    return plan.placement, plan.step_s


def train(mbit: float, folder: Path, file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The result of one run."""
    folder.mkdir()
    with slow_nodes(mbit, folder) as nodes:
        running = nodes.train(file, *overrides)
        nodes.join(1)
        return result_of(running)


def measure_row(row: str, mbit: float, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train a job with both placements, in turn."""
    file = folder / f"{row}.toml"
    rate = mbit * 1e6 / 8 / PER_NODE
    file.write_text(JOB.format(steps=steps, per_node=PER_NODE, nic_bytes_per_s=rate, cache=folder / "data"))
    worst = f"layout.placement={list(find_worst(file, ROWS[row]) or range(RANKS))}"
    jobs = {"advised": ROWS[row], "worst": (*ROWS[row], worst)}
    if predict(file, ROWS[row])[0]:
        jobs["rank order"] = (*ROWS[row], "layout.placement=rank-order")
    planned = {name: predict(file, overrides) for name, overrides in jobs.items()}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    losses: dict[str, list[float]] = {}
    tokens = 4 * 32
    for number in range(rounds):
        for name, overrides in jobs.items():
            result = train(mbit, folder / f"{row}-{name}-{number}", file, overrides)
            assert result["audit_ok"], f"{row}, {name}: {result['differences']}"
            found[name].append(tokens / result["tokens_per_s"])
            losses[name] = result["losses"]
    for name, other in losses.items():
        for ours, theirs in zip(losses["advised"], other, strict=True):
            assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(ours), f"{row}, {name}: {ours} and {theirs}"
    ratios = [worst / advised for worst, advised in zip(found["worst"], found["advised"], strict=True)]
    step_s = {name: statistics.median(times) for name, times in found.items()}
    return {
        "row": row,
        "overrides": list(ROWS[row]),
        "placement": {name: list(slots or range(RANKS)) for name, (slots, _) in planned.items()},
        "predicted_step_s": {name: seconds for name, (_, seconds) in planned.items()},
        "step_s": step_s,
        "rounds_s": found,
        "predicted_ratio": planned["worst"][1] / planned["advised"][1],
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate between the nodes, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each placement")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_namespaces()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure_row(row, options.mbit, options.rounds, options.steps, Path(folder))
            for row in options.rows
        ]
    if options.json:
        sys.stdout.write(json.dumps({"mbit": options.mbit, "cores": os.cpu_count(), "rows": rows}) + "\n")
        return
    for row in rows:
        sys.stdout.write(f"{' '.join(row['overrides'])}\n")
        for name in row["step_s"]:
            rounds = ", ".join(f"{seconds:.2f}" for seconds in row["rounds_s"][name])
            sys.stdout.write(
                f"  {name:10} slots {row['placement'][name]}  {row['step_s'][name]:.2f} s/step ({rounds}), "
                f"predicted {row['predicted_step_s'][name]:.2f} s\n"
            )
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        predicted = f"predicted {row['predicted_ratio']:.2f}"
        sys.stdout.write(f"  worst / advised {row['ratio']:.2f} ({ratios}), {predicted}\n")


if __name__ == "__main__":
    main()
