"""Trains short jobs with `meshwright train` on one GPU: step times that validation compares with.

Shapes that no rate was chosen on: a large vocabulary, GPT-2 XL, two kinds of experts, wide and narrow layers.
Prints one JSON object per job, with the planned step (no probe) and the measured median.

    python benchmarks/own_runs.py --out rows.jsonl              # on a GPU: about 4 minutes
    python benchmarks/own_runs.py --only experts --limit 60
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 14, 5
TIMEOUT_S = 120.0
LLAMA = {"tied_embeddings": False}
EXPERTS = {**LLAMA, "num_layers": 16, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16,
           "ffn_size": 2048, "vocab_size": 32000, "num_experts": 16, "experts_per_token": 2}  # fmt: skip
LARGE_VOCABULARY = {"tied_embeddings": True, "num_layers": 36, "hidden_size": 2048, "num_heads": 16,
                    "num_kv_heads": 2, "ffn_size": 11008, "vocab_size": 151936}  # fmt: skip
GPT2_XL = {"num_layers": 48, "hidden_size": 1600, "num_heads": 25, "num_kv_heads": 25, "ffn_size": 6400,
           "vocab_size": 50304, "tied_embeddings": True, "positions": "learned", "max_positions": 1024,
           "norm": "layer", "activation": "gelu", "attention_bias": True, "ffn_bias": True}  # fmt: skip
JOBS: dict[str, tuple[dict[str, Any], int, int, tuple[str, ...]]] = {
    "experts": (EXPERTS, 4, 4096, ()),
    "gpt2-xl": (GPT2_XL, 16, 1024, ()),
    "large-vocabulary": (LARGE_VOCABULARY, 4, 4096, ()),
    "large-vocabulary-fp8": (LARGE_VOCABULARY, 4, 4096, ("train.precision=fp8",)),
    "many-experts": (
        {**EXPERTS, "num_layers": 8, "num_experts": 64, "experts_per_token": 6, "expert_ffn_size": 1408,
         "shared_experts": 1}, 4, 4096, (),
    ),
    "wide": (
        {**LLAMA, "num_layers": 8, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336,
         "vocab_size": 128256}, 2, 8192, (),
    ),
    "narrow": (
        {"tied_embeddings": True, "num_layers": 24, "hidden_size": 896, "num_heads": 14, "num_kv_heads": 2,
         "ffn_size": 4864, "vocab_size": 151936}, 8, 4096, (),
    ),
    "experts-compiled": (EXPERTS, 4, 4096, ("train.block_backend=compile",)),
    "gpt2-xl-eager": (GPT2_XL, 16, 1024, ("train.block_backend=eager",)),
}  # fmt: skip
"""Model, sequences per step, tokens of each, further settings."""


def job_text(name: str) -> str:
    """The job as TOML."""
    model, batch, length, _ = JOBS[name]
    lines = ["[model]"] + [f"{key} = {json.dumps(value)}" for key, value in model.items()]
    lines += ['[cluster]\ndevice = "cuda"']
    lines += [f'[data]\npath = "builtin:python-stdlib"\nseq_len = {length}\ntokenizer = "byte"']
    lines += [f'[train]\nsteps = {STEPS}\nglobal_batch = {batch}\nlr = 1e-4\nprecision = "bf16"']
    lines += [f'[layout]\nmicro_batch = {batch}\nrecompute = "selective"']
    lines += ["[checkpoint]\nevery_minutes = 0.0"]
    return "\n".join(lines) + "\n"


def run(name: str) -> dict[str, Any]:
    """One job: its planned and measured step, and its peak."""
    command = [sys.executable, "-m", "meshwright"]
    settings = JOBS[name][3]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job, runs = folder / "job.toml", folder / "run"
        job.write_text(job_text(name))
        row: dict[str, Any] = {"job": name, "settings": settings}
        done = subprocess.run(
            [*command, "train", str(job), *settings, f"run_dir={runs}"], check=False,
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        steps, peak = [], None
        for path in sorted(runs.rglob("events*.jsonl")):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event.get("event") == "step" and event["step"] > WARM_UP:
                    steps.append(event["step_s"])
                peak = max(peak or 0, event.get("peak_bytes") or 0) or peak
        for path in sorted(runs.rglob("plan*.toml")):
            row["planned"] = tomllib.loads(path.read_text()).get("time")
        row |= {"step_s": statistics.median(steps) if steps else None, "steps": steps, "peak_bytes": peak}
        if done.returncode:
            row["failed"] = (done.stdout + done.stderr)[-800:]
    return row


def main() -> None:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=JOBS, help="repeatable")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no job starts")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    started = time.monotonic()
    for name in given.only or JOBS:
        if time.monotonic() - started > given.limit:
            print(f"not started: {name}")
            continue
        try:
            row = run(name)
        except subprocess.TimeoutExpired:
            row = {"job": name, "failed": f"longer than {TIMEOUT_S:g} s"}
        print(json.dumps(row), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
