"""Prediction errors on this machine, with assumed rates and with the file of ``meshwright probe``.

    meshwright probe -o probed.toml
    python benchmarks/probe_accuracy.py probed.toml

Measures steps of models whose shapes the probe does not use. On a CPU, which other processes may share,
steps are measured in CPU time, as the probe does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import plan_from
from meshwright.plan.predict import Prediction, predict
from meshwright.spec.cluster import count_cores
from meshwright.spec.job import Job
from meshwright.spec.load import build_job

ON_CPU: dict[str, dict[str, Any]] = {
    "tiny, 6 x 64 tokens": {"model": {"preset": "tiny"}, "seq_len": 64, "batch": 6},
    "demo-2m, 4 x 64 tokens": {"model": {"preset": "demo-2m"}, "seq_len": 64, "batch": 4},
    "2 x 512 wide, 4 x 128 tokens": {
        "model": {
            "num_layers": 2, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8, "ffn_size": 1408,
            "vocab_size": 2048, "tied_embeddings": False,
        },
        "seq_len": 128,
        "batch": 4,
    },
}  # fmt: skip
WIDE = {"num_kv_heads": 8, "ffn_size": 8192, "vocab_size": 128256, "tied_embeddings": False}
ON_GPU: dict[str, dict[str, Any]] = {
    "16 x 2048 wide, 8 x 4096 tokens": {
        "model": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32} | WIDE,
        "seq_len": 4096,
        "batch": 8,
    },
    "28 x 3072 wide, 4 x 4096 tokens": {
        "model": {"num_layers": 28, "hidden_size": 3072, "num_heads": 24} | WIDE,
        "seq_len": 4096,
        "batch": 4,
    },
}


def build(case: dict[str, Any], cluster: dict[str, Any], on_gpu: bool, recompute: str) -> Job:
    """The job of a case with the settings of the probe: one process, one micro-batch."""
    train: dict[str, Any] = {"steps": 10, "global_batch": case["batch"]}
    train |= {"precision": "bf16", "block_backend": "triton", "residual_dtype": "bf16"} if on_gpu else {}
    return build_job(
        {
            "name": "case",
            "model": dict(case["model"]),
            "data": {"path": "-", "seq_len": case["seq_len"]},
            "train": train,
            "layout": {"dp_replicate": 1, "micro_batch": case["batch"], "recompute": recompute},
            "cluster": cluster,
        }
    )


def measure(prediction: Prediction) -> tuple[float, int | None]:
    """Step time, and on a GPU its peak memory."""
    from meshwright.verify.bench.machine import time_steps  # noqa: PLC0415  (after the environment is set)

    plan = plan_from(prediction)
    unmeasured = dataclasses.replace(plan.job.cluster, matmul_flops_per_s=1.0)
    job = dataclasses.replace(plan.job, cluster=unmeasured)
    found = time_steps(dataclasses.replace(plan, job=job))
    return found.step_s, found.peak_bytes


def main() -> None:
    """Print one row per case, or all as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="file of meshwright probe")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = tomllib.loads(args.file.read_text())["device"]
    on_gpu = device == "cuda"
    prepare_environment(threads=count_cores() if on_gpu else 1)
    rows = []
    cases = ON_GPU if on_gpu else ON_CPU
    for name, case in cases.items():
        for recompute in ("selective", "none") if on_gpu else ("none",):
            clusters = ({"preset": "local", "device": device}, {"file": str(args.file)})
            jobs = [build(case, dict(cluster), on_gpu, recompute) for cluster in clusters]
            assumed, probed = (predict(job, job.layout) for job in jobs)
            step_s, peak = measure(probed)
            rows.append(
                {
                    "case": name,
                    "recompute": recompute,
                    "assumed_s": assumed.time.total_s,
                    "probed_s": probed.time.total_s,
                    "measured_s": step_s,
                    "predicted_peak_bytes": probed.ledger.peak_bytes,
                    "measured_peak_bytes": peak,
                }
            )
            if not args.json:
                print(_line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(rows))


def _line(row: dict[str, Any]) -> str:
    took = row["measured_s"]
    parts = [f"{row['case']}, {row['recompute']}: measured {took * 1e3:.1f} ms"]
    for key, label in (("assumed_s", "predicted without probe"), ("probed_s", "with probe")):
        parts.append(f"{label} {row[key] * 1e3:.1f} ms ({row[key] / took - 1:+.1%})")
    if peak := row["measured_peak_bytes"]:
        planned = row["predicted_peak_bytes"]
        parts.append(f"peak {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB ({planned / peak - 1:+.1%})")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
