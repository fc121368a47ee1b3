"""Shared by benchmarks that compare with plain torch: optimizer, tokens, paired timing, report.

Imports torch: set the environment first.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from meshwright.spec.job import Train
from meshwright.spec.train_defaults import setting
from meshwright.train.trainer import Trainer


def build_adamw(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """Fused AdamW, with weight decay for matrices only."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": setting(train, "weight_decay"),
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=True)


def open_tokens(trainer: Trainer) -> npt.NDArray[np.uint16]:
    """The first shard, memory-mapped."""
    return np.memmap(next(Path(trainer.assignment.data_dir).glob("train-*.bin")), dtype=np.uint16, mode="r")


def time_pairs(
    count: int,
    one: Callable[[], Any],
    other: Callable[[], Any],
    after: Callable[[], None] = lambda: None,
) -> Iterator[tuple[float, float]]:
    """Seconds of two functions, called alternately in changing order, with a barrier before each call.

    Args:
        count: Number of pairs.
        one: Timed.
        other: Timed.
        after: Called after each of them, not timed.
    """
    for pair in range(count):
        seconds = {}
        for function in (one, other) if pair % 2 else (other, one):
            dist.barrier()
            started = time.perf_counter()
            function()
            seconds[function] = time.perf_counter() - started
            after()
        yield seconds[one], seconds[other]


def report(
    title: str, rows: Sequence[dict[str, Any]], line: Callable[[dict[str, Any]], str], as_json: bool
) -> None:
    """Print the rows with date and machine, as text or as one JSON object."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    result = {"date": str(datetime.datetime.now(tz=datetime.UTC).date()), "machine": machine, "rows": rows}
    if as_json:
        print(json.dumps(result))
        return
    print(f"{title}, {result['date']}, {machine}")
    for row in rows:
        target = f" (target: at most {row['target']:+.0%})" if row["target"] is not None else ""
        print(f"  {line(row)}, median of {row['pairs']} pairs {row['overhead']:+.2%}{target}")
