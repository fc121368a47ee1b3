"""What benchmarks of pairs share: the optimizer that one writes by hand, its tokens, timing, and the report.

It imports torch: set the environment first.
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
    """Fused, with decay for matrices alone."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": setting(train, "weight_decay"),
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(0.9, 0.95), fused=True)


def open_tokens(trainer: Trainer) -> npt.NDArray[np.uint16]:
    """The first shard, mapped."""
    return np.memmap(next(Path(trainer.assignment.data_dir).glob("train-*.bin")), dtype=np.uint16, mode="r")


def time_pairs(
    count: int,
    one: Callable[[], Any],
    other: Callable[[], Any],
    after: Callable[[], None] = lambda: None,
) -> Iterator[tuple[float, float]]:
    """Seconds of two functions in turn, which begins first in turn, too; all ranks begin together.

    Args:
        count: Pairs.
        one: Timed.
        other: Timed beside it.
        after: What is done after each of them, and not timed.
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
    """Print the rows with date and machine, for people or as one object."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    result = {"date": str(datetime.datetime.now(tz=datetime.UTC).date()), "machine": machine, "rows": rows}
    if as_json:
        print(json.dumps(result))
        return
    print(f"{title}, {result['date']}, {machine}")
    for row in rows:
        promise = f" (at most {row['promise']:+.0%} is promised)" if row["promise"] is not None else ""
        print(f"  {line(row)}, median of {row['pairs']} pairs {row['overhead']:+.2%}{promise}")
