"""Step time of replicas of which one is slow: plain DDP, and with backup replicas.

    python benchmarks/backup_replicas.py [--json]

Rank 0 sleeps before every block. Sleeping takes no CPU: the figures depend little on the
number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import meshwright as mw

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "quickstart.toml")
SLEEP_S = "BACKUP_BENCHMARK_SLEEP_S"
JOB = (
    "train.steps=40",
    "train.global_batch=12",
    "layout.micro_batch=2",
    "train.eval_every=0",
    "model.num_layers=4",
)
LAYOUTS = {
    "DDP, 3 replicas": ("layout.dp_replicate=3",),
    "3 replicas and 1 backup": ("layout.dp_replicate=4", "layout.backup_replicas=1"),
}


def slow_rank(run_dir: str, listener: object = None) -> int:
    """Entry point of a rank: rank 0 sleeps before every block."""
    from meshwright.models import decoder  # noqa: PLC0415
    from meshwright.train.worker import run_rank  # noqa: PLC0415

    if os.environ["RANK"] == "0":
        original, pause = decoder.Block.forward, float(os.environ[SLEEP_S])

        def forward(block: decoder.Block, *args: Any, **kwargs: Any) -> Any:
            time.sleep(pause)
            return original(block, *args, **kwargs)

        decoder.Block.forward = forward  # type: ignore[method-assign]
    return run_rank(run_dir, listener)


def measure(overrides: tuple[str, ...], sleep_s: float, folder: Path) -> tuple[float, list[float]]:
    """Median step time after the first ten steps, and the losses."""
    os.environ[SLEEP_S] = str(sleep_s)
    job = mw.load_job(EXAMPLE, *JOB, *overrides, f"run_dir={folder}")
    run = job.train()
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    times = [e["step_s"] for e in events if e["event"] == "step" and e["rank"] == 1 and e["step"] > 10]
    return statistics.median(times), run.losses


def main() -> None:
    """Print step times without and with a slow rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    from meshwright.runs import train  # noqa: PLC0415

    train.ENTRY = "backup_replicas:slow_rank"
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, overrides) in enumerate(LAYOUTS.items()):
            calm_s, calm = measure(overrides, 0.0, Path(temporary) / f"{number}-calm")
            slow_s, slow = measure(overrides, 0.1, Path(temporary) / f"{number}-slow")
            assert calm == slow, "the losses do not depend on who is slow"
            found[name] = {"calm_s": calm_s, "slow_s": slow_s, "ratio": slow_s / calm_s}
    if arguments.json:
        print(json.dumps(found))
        return
    for name, times in found.items():
        print(f"{name}: {times['calm_s']:.3f} s per step, with a slow rank {times['slow_s']:.3f} s "
              f"({times['ratio']:.2f} times)")  # fmt: skip


if __name__ == "__main__":
    main()
