"""Planned against measured DDP step on two local ranks, over both transports.

A pair is a probe (``meshwright probe``), whose file the plans use, and then a few steps of every model, over
gloo and over shared memory. Pairs are repeated, because the speed of a shared machine changes within minutes;
the figure is the median over the pairs of predicted over measured time. The measured step is that of the
slowest rank minus run-queue wait, as for the probe (``measure.own_time.estimate_uncontended_s``): the
prediction is for an otherwise idle machine. ``wall`` is the median with that time.

    python benchmarks/ddp_step.py [--pairs 3] [--steps 12] [--model NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import meshwright as mw
from meshwright.launch.environment import prepare_environment
from meshwright.measure.own_time import ProcessTime, estimate_uncontended_s
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.runs.data import prepare_data
from meshwright.runs.measure import measure_plan
from meshwright.runs.reporter import SILENT
from meshwright.spec.load import load_job

RANKS = 2
WARM_UP = 3
TRANSPORTS = ("gloo", "shared_memory")
JOB = """
[model]
num_layers = {layers}
hidden_size = {width}
num_heads = 8
num_kv_heads = 8
ffn_size = {ffn}
vocab_size = {vocab}
tied_embeddings = false
[data]
path = "builtin:python-stdlib"
seq_len = {seq_len}
tokenizer = "byte"
[train]
steps = 20
global_batch = {batch}
"""
MODELS: dict[str, dict[str, int]] = {
    "quickstart": {},
    "small": {"layers": 4, "width": 128, "ffn": 384, "vocab": 512, "seq_len": 64, "batch": 8},
    "wide": {"layers": 2, "width": 512, "ffn": 1536, "vocab": 8192, "seq_len": 32, "batch": 2},
    "embedding": {"layers": 1, "width": 512, "ffn": 1024, "vocab": 32768, "seq_len": 16, "batch": 2},
}
"""``quickstart`` is the example with a batch of 8; the others differ in the bytes of their gradients."""


def plan_step(model: str, transport: str, cluster_file: str, steps: int, folder: Path) -> PlanContract:
    """The plan of a model on two ranks."""
    source = Path(__file__).parent.parent / "examples" / "quickstart.toml"
    if table := MODELS[model]:
        source = folder / f"{model}.toml"
        source.write_text(JOB.format(**table), encoding="utf-8")
    keys = [
        f"cluster.file={cluster_file}",
        f"layout.dp_replicate={RANKS}",
        f"train.transport={transport}",
        f"train.steps={steps}",
        "train.eval_every=0",
        f"train.global_batch={MODELS[model].get('batch', 8)}",
    ]
    return build_plan(load_job(str(source), keys))[0]


def measure_step(plan: PlanContract) -> tuple[float, float]:
    """Median step of the slowest rank; and the same without the time in run queues."""
    run = measure_plan(plan, prepare_data(plan.job, SILENT), "ddp step", lambda text, steps: None)
    ranks: list[Any] = [run.times[rank] for rank in range(RANKS)]
    walls = [max(step) for step in zip(*(rank["step_s"] for rank in ranks), strict=True)][WARM_UP:]
    spent = [
        ProcessTime(max(cpu for cpu, _ in step), max(queued for _, queued in step))
        for step in zip(*(rank["spent_s"] for rank in ranks), strict=True)
    ][WARM_UP:]
    return statistics.median(walls), estimate_uncontended_s(walls, spent)


def run_pair(models: list[str], steps: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Probe, plan and measure: a row for each model and transport."""
    cluster_file = str(folder / "probed.toml")
    mw.probe(cluster_file, cpu=True)
    for model in models:
        for transport in TRANSPORTS:
            plan = plan_step(model, transport, cluster_file, steps, folder)
            wall_s, uncontended_s = measure_step(plan)
            yield {
                "model": model,
                "transport": transport,
                "predicted_s": plan.step_s,
                "parts": plan.breakdown_s,
                "uncontended_s": uncontended_s,
                "wall_s": wall_s,
                "error": plan.step_s / uncontended_s - 1,
                "load": os.getloadavg()[0],
            }


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the pairs."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["transport"]), []).append(row)
    keys = ("predicted_s", "uncontended_s", "wall_s", "error", "load")
    return [
        {"model": model, "transport": transport, "pairs": len(pairs)}
        | {key: statistics.median(row[key] for row in pairs) for key in keys}
        | {"errors": [row["error"] for row in pairs]}
        for (model, transport), pairs in found.items()
    ]


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=(*MODELS, "all"), default="all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_environment(threads=1)
    models = list(MODELS) if options.model == "all" else [options.model]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.pairs):
            for row in run_pair(models, options.steps, Path(name)):
                rows.append(row)
                print_row(row, sys.stderr)
                parts = ", ".join(f"{part} {seconds * 1e3:.1f} ms" for part, seconds in row["parts"].items())
                sys.stderr.write(f"    {parts}\n")
    medians = summarize(rows)
    if options.json:
        sys.stdout.write(json.dumps({"rows": medians, "pairs": rows}, indent=1) + "\n")
        return
    sys.stdout.write(f"medians of {options.pairs} pairs\n")
    for row in medians:
        print_row(row, sys.stdout)


def print_row(row: dict[str, Any], out: TextIO) -> None:
    """One line."""
    times = "  ".join(
        f"{key[:-2]} {row[key] * 1e3:7.1f} ms" for key in ("predicted_s", "uncontended_s", "wall_s")
    )
    end = f"error {row['error']:+6.1%}  load {row['load']:.1f}"
    out.write(f"{row['model']:<11}{row['transport']:<14}{times}  {end}\n")
    out.flush()


if __name__ == "__main__":
    main()
