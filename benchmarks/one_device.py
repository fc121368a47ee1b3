"""Training steps on one device: ours beside transformers' Llama with torch.compile, same shape, same batch.

Each runs in a process of its own. Ours is a rank's session and step as ``meshwright train`` runs them, eager
and compiled; theirs is the loop that one writes by hand: float32 weights, bf16 autocast, fused AdamW, clips.
FLOPs are counted alike for both: 6 for each parameter but the input embedding a token, plus causal attention
(half). The shape is Llama 3.2 1B's, untied.

    python benchmarks/one_device.py                      # on a GPU: 8 x 4096 tokens
    python benchmarks/one_device.py --small              # what a CPU can do, to try the benchmark
"""

from __future__ import annotations

import argparse
import datetime
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

prepare_environment(threads=os.cpu_count() or 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402

from meshwright.plan.compute import flops_per_token  # noqa: E402
from meshwright.spec.job import Job  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402

LARGE = {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192,
         "vocab_size": 128256, "rope_theta": 500000.0}  # fmt: skip
SMALL = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 512,
         "vocab_size": 1024}  # fmt: skip
KINDS = ("ours", "ours compiled", "transformers", "transformers compiled")
WARM_UP = 4
"""Steps that are not timed; ours audits its second one."""


def build_shape(small: bool, compiled: bool, recompute: str, folder: Path) -> Job:
    """The job of our side; theirs takes its numbers from it."""
    length, batch = (128, 4) if small else (4096, 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tree: dict[str, Any] = {
        "model": SMALL if small else LARGE,
        "data": {"path": str(folder), "seq_len": length},
        "train": {
            "steps": 10**6,
            "global_batch": batch,
            "lr": 1e-4,
            "precision": "bf16",
            "compile": compiled,
        },
        "layout": {"dp_replicate": 1, "micro_batch": batch, "recompute": recompute},
        "cluster": {"device": device, "matmul_flops_per_s": 1e12},
        "checkpoint": {"every_minutes": 0.0},
    }
    return build_job(tree)


def write_tokens(folder: Path, job: Job) -> None:
    """Random tokens as prepared data: what they say does not matter to the time."""
    from meshwright.prepare.tokenizer import ByteTokenizer  # noqa: PLC0415
    from meshwright.prepare.writer import ShardWriter  # noqa: PLC0415

    generator = np.random.default_rng(0)
    with ShardWriter(folder, ByteTokenizer()) as writer:
        for split, samples in (("train", 64), ("eval", 1)):
            writer.add(split, generator.integers(0, 256, samples * job.data.seq_len + 1).astype(np.uint16))
        writer.finish()


def ours(job: Job, folder: Path) -> Callable[[], float]:
    """A step as a rank takes it."""
    from one_rank import build_rank  # noqa: PLC0415

    from meshwright.run.loop import Meter, train_step  # noqa: PLC0415

    write_tokens(folder, job)
    session = build_rank(job, folder, folder)
    meter = Meter(session)

    def step() -> float:
        train_step(session, meter)
        return float("nan")

    return step


def theirs(job: Job, compiled: bool) -> Callable[[], float]:
    """The loop that one writes by hand around transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    model, device = job.model, torch.device(job.cluster.device)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=job.data.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        network = LlamaForCausalLM(config)
    called = torch.compile(network) if compiled else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    shape = (job.train.global_batch, job.data.seq_len)

    def step() -> float:
        tokens = torch.randint(0, 256, shape, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(kind: str, small: bool, recompute: str, steps: int) -> dict[str, Any]:
    """Median step, FLOP/s and peak memory of one kind."""
    compiled = kind.endswith("compiled")
    with tempfile.TemporaryDirectory() as name:
        job = build_shape(small, compiled, recompute, Path(name))
        step = ours(job, Path(name)) if kind.startswith("ours") else theirs(job, compiled)
        on_gpu = job.cluster.device == "cuda"
        for _ in range(WARM_UP):
            step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    tokens = job.train.global_batch * job.data.seq_len
    step_s = statistics.median(times)
    return {
        "kind": kind,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "flops_per_s": tokens * flops_per_token(job.model, job.data.seq_len) / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def run_alone(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, so that no one inherits another's memory."""
    command = [sys.executable, __file__, "--only", kind, "--steps", str(arguments.steps)]
    command += ["--recompute", arguments.recompute, *(["--small"] if arguments.small else [])]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode:
        return {"kind": kind, "failed": answer.returncode}
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    """Print each kind and the ratio of ours to the best of theirs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.only:
        row = measure(arguments.only, arguments.small, arguments.recompute, arguments.steps)
        print(json.dumps(row))
        return
    rows = [run_alone(kind, arguments) for kind in arguments.kinds.split(",")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result: dict[str, Any] = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "machine": f"{device}, torch {torch.__version__}",
        "rows": rows,
    }
    rates = {row["kind"]: row.get("flops_per_s", 0.0) for row in rows}
    best = {
        side: max((r for k, r in rates.items() if k.startswith(side)), default=0.0)
        for side in ("ours", "tran")
    }
    result["ratio"] = best["ours"] / best["tran"] if best["tran"] else None
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"one device, {result['date']}, {result['machine']}")
    for row in rows:
        if "failed" in row:
            print(f"  {row['kind']:22} failed with status {row['failed']}")
            continue
        peak = f", peak {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
        rate = f"{row['flops_per_s'] / 1e12:7.2f} TFLOP/s"
        print(f"  {row['kind']:22} {row['step_s'] * 1e3:9.1f} ms, {rate}{peak}")
    if result["ratio"]:
        print(f"  ours over transformers: {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
