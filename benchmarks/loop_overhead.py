"""Overhead of the training loop over a plain torch loop with the same model: one process, one thread, CPU.

Both train the same model on the same batches, in alternate steps in one process, so that other load on the
machine affects both. The figure is the median over pairs of (ours - plain) / plain. Our side is a full step:
sample order, memory-mapped reading, accumulation, clipping, learning rate, token counts, events.

    python benchmarks/loop_overhead.py [--pairs 100]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from baseline import build_adamw, open_tokens, report  # noqa: E402
from one_rank import build_rank  # noqa: E402

from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.parallel.build import build_model  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402
from meshwright.train.loop import start_meter  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402


def build_ours(folder: Path, micro_batch: int) -> Trainer:
    """The trainer of a rank."""
    prepared = folder / "data"
    prepare_corpus(CorpusSpec(sources=("builtin:python-stdlib",), out=str(prepared)), folder)
    tree = {
        "model": {"num_layers": 6, "hidden_size": 192, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 512,
                  "vocab_size": 320, "tied_embeddings": True},
        "data": {"path": str(prepared), "seq_len": 128},
        "train": {"steps": 10**6, "global_batch": 8, "lr": 1e-3},
        "layout": {"dp_replicate": 1, "micro_batch": micro_batch},
        "cluster": {"device": "cpu", "matmul_flops_per_s": 1e11},
    }  # fmt: skip
    return build_rank(build_job(tree), folder, prepared)


def build_plain(trainer: Trainer) -> Callable[[], float]:
    """The plain loop: memmap, slices, forward, backward, clip, step."""
    job = trainer.job
    model = build_model(job, torch.device("cpu"))
    optimizer, tokens = build_adamw(model, job.train), open_tokens(trainer)
    length, batch, micro = job.data.seq_len, job.train.global_batch, job.layout.micro_batch
    position = 0

    def step() -> float:
        nonlocal position
        total = 0.0
        for _ in range(batch // micro):
            starts = [(position + i) * length for i in range(micro)]
            rows = torch.from_numpy(np.stack([tokens[s : s + length + 1].astype(np.int64) for s in starts]))
            position += micro
            loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / (batch * length)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.train.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def measure(pairs: int, micro_batch: int) -> dict[str, Any]:
    """Time our steps and plain steps alternately."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_ours(Path(folder), micro_batch)
        plain, meter = build_plain(trainer), start_meter(trainer)
        for _ in range(5):
            trainer.train_step(meter)
            plain()
        ours_s, plain_s = [], []
        for pair in range(pairs):
            order = ((trainer.train_step, (meter,), ours_s), (plain, (), plain_s))
            for function, arguments, times in order if pair % 2 else reversed(order):
                started = time.perf_counter()
                function(*arguments)
                times.append(time.perf_counter() - started)
        ratios = [(a - b) / b for a, b in zip(ours_s, plain_s, strict=True)]
    return {
        "micro_batch": micro_batch,
        "pairs": pairs,
        "ours_s": statistics.median(ours_s),
        "plain_s": statistics.median(plain_s),
        "overhead": statistics.median(ratios),
        "target": 0.02,
    }


def main() -> None:
    """Print the overhead with and without gradient accumulation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [measure(arguments.pairs, micro_batch) for micro_batch in (8, 2)]
    report("loop overhead", rows, _line, arguments.json)


def _line(row: dict[str, Any]) -> str:
    ours_ms, plain_ms = row["ours_s"] * 1e3, row["plain_s"] * 1e3
    return f"micro_batch {row['micro_batch']}: ours {ours_ms:.2f} ms, plain {plain_ms:.2f} ms"


if __name__ == "__main__":
    main()
