"""Cost of the flight recorder: CPU time of a step of the quickstart's layout with and without it, two ranks.

Both kinds of steps alternate in the same two processes, in blocks, so that other load on the machine affects
both. Without: calls and phases are not recorded and the heartbeat stops. The figure is the CPU time of both
ranks per step, with / without - 1, over all blocks.

    python benchmarks/flight_recorder.py [--blocks 20] [--steps 10]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import torch.distributed as dist  # noqa: E402
from baseline import report  # noqa: E402

from meshwright.core.events import Event  # noqa: E402
from meshwright.data.prepare import CorpusSpec, prepare_corpus  # noqa: E402
from meshwright.launch.assignment import Assignment  # noqa: E402
from meshwright.measure.flight_recorder import FlightRecorder  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.plan.contract import PLAN_FILE, write_plan  # noqa: E402
from meshwright.runs.ranks import build_launch  # noqa: E402
from meshwright.spec.load import load_job  # noqa: E402
from meshwright.train.loop import report_end, start_meter  # noqa: E402
from meshwright.train.trainer import Trainer  # noqa: E402
from meshwright.train.worker import run_with_trainer  # noqa: E402

ROOT = Path(__file__).parents[1]
WARM_UP = 5


def measure_blocks(trainer: Trainer) -> None:
    """Train blocks of steps with and without the recorder; writes the CPU time of each."""
    blocks, steps = int(os.environ["BLOCKS"]), int(os.environ["STEPS"])
    meter = start_meter(trainer)
    for _ in range(WARM_UP):
        trainer.train_step(meter)
    times: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * blocks):
        recorded = block % 2 == 0
        with contextlib.ExitStack() as stack:
            if not recorded:
                stack.enter_context(mock.patch.multiple(FlightRecorder, **DISABLED))
                stack.enter_context(mock.patch.object(dist.Work, "wait", trainer.flight_recorder._wait))
            started = time.process_time()
            for _ in range(steps):
                trainer.train_step(meter)
            times[recorded].append((time.process_time() - started) / steps)
    calls = sum(row["calls"] for row in trainer.counter.rows() if row["phase"] == "step")
    trainer.events.write("cost", recorded=times[True], plain=times[False], calls=calls / trainer.step)
    report_end(trainer, 0, stopping=False)


DISABLED: dict[str, Any] = {
    "record": lambda *_: None,
    "enter": lambda *_: None,
    "_beat": lambda _: None,
    "read_data": lambda _, items, *__: iter(items),
}
"""What the recorder does in a step, left out."""


def run_rank(run_dir: str, link: Any) -> int:
    """One rank of the benchmark."""
    return run_with_trainer(measure_blocks, run_dir, link)


def measure(blocks: int, steps: int) -> dict[str, Any]:
    """Run two ranks; returns CPU seconds per step of both together."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare_corpus(CorpusSpec(sources=("builtin:python-stdlib",), out=str(data)), Path(folder))
        overrides = [
            f"data.path={data}",
            "layout.dp_replicate=2",
            "train.steps=1000000",
            "cluster.device=cpu",
        ]
        plan, _ = build_plan(load_job(str(ROOT / "examples" / "quickstart.toml"), overrides))
        run_dir = Path(folder)
        write_plan(plan, run_dir / PLAN_FILE)
        Assignment(folder, str(data), str(run_dir / "checkpoints")).write()
        launch = build_launch("flight_recorder:run_rank", plan.job, run_dir, found.append)
        launch.environment = {**launch.environment, "BLOCKS": str(blocks), "STEPS": str(steps)}
        launch.run()
    costs = [event for event in found if event["event"] == "cost"]
    recorded = [sum(pair) for pair in zip(*(event["recorded"] for event in costs), strict=True)]
    plain = [sum(pair) for pair in zip(*(event["plain"] for event in costs), strict=True)]
    return {
        "calls_per_step": costs[0]["calls"],
        "recorded_cpu_s": statistics.median(recorded),
        "plain_cpu_s": statistics.median(plain),
        "pairs": blocks,
        "overhead": statistics.median(a / b - 1 for a, b in zip(recorded, plain, strict=True)),
        "target": 0.01,
    }


def main() -> None:
    """Print the cost of the flight recorder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report("flight recorder", [measure(arguments.blocks, arguments.steps)], _line, arguments.json)


def _line(row: dict[str, Any]) -> str:
    recorded_ms, plain_ms = row["recorded_cpu_s"] * 1e3, row["plain_cpu_s"] * 1e3
    calls = f"{row['calls_per_step']:.0f} calls per step"
    return f"{calls}, CPU per step {recorded_ms:.2f} ms, {plain_ms:.2f} ms without"


if __name__ == "__main__":
    main()
