"""Steps of a run whose ranks are killed, as a share of the steps of a fault-free run in the same time.

Ranks of the tiny job of ``meshwright faults`` are killed at random times, with several seeds. All losses, and
the parameters and optimizer state of all checkpoints, must be those of the fault-free run bit by bit.

Two shares are printed. ``share`` compares with the fault-free run, which runs afterwards; it is only right if
the load of the machine stays the same. ``by own rate`` compares with the rate of the same run outside of its
recoveries.

    python benchmarks/kill_goodput.py [--kills 20] [--gap 9] [--seeds 3] [--layout ddp] [--json]
    python benchmarks/kill_goodput.py --seconds 100     # the kill loop: as many kills as come in 100 s
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.elastic.faults.invariants import compare_runs
from meshwright.elastic.faults.schedule import Fault, fail
from meshwright.runs.faults.criteria import KILL_LOOP_GOODPUT, count_steps, is_settled, measure_own_rate
from meshwright.runs.faults.job import LAYOUTS, WORLD_SIZE, TinyJob
from meshwright.runs.faults.trial import Trial

TARGET_KILLS, TARGET_LOOP = 0.9, KILL_LOOP_GOODPUT / 100
GRACE_S = 300.0


def build_schedule(seed: int, gap_s: float, kills: int | None, seconds: float | None) -> list[Fault]:
    """Kills of random ranks at random times: a number of them, or those of a time."""
    generator, schedule, after_s = random.Random(seed), [], 0.0
    while True:
        after_s += generator.expovariate(1 / gap_s)
        if len(schedule) == kills or (seconds is not None and after_s >= seconds):
            return schedule
        schedule.append(fail(rank=generator.randrange(WORLD_SIZE), after_s=round(after_s, 2)))


def run_for(trial: Trial, seconds: float, steps: int = 0) -> Trial:
    """Run for a time since the first step, and at least a number of steps; then check the invariants."""

    def is_over(one: Trial) -> bool:
        first = one.view.first_step_at
        is_late = first is not None and time.time() >= first + seconds
        return is_late and one.view.steps_done >= steps and (not one.schedule or is_settled(one))

    trial.run(is_over, 2 * seconds + GRACE_S)
    trial.check()
    return trial


def measure(layout: str, schedules: list[list[Fault]], seconds: list[float]) -> list[dict[str, Any]]:
    """One row per schedule."""
    with tempfile.TemporaryDirectory() as folder:
        job = TinyJob.write(Path(folder))

        def build(name: str, schedule: list[Fault]) -> Trial:
            return Trial(job, job.folder / name, LAYOUTS[layout], schedule)

        trials = [
            run_for(build(f"killed-{number}", schedule), seconds[number])
            for number, schedule in enumerate(schedules)
        ]
        calm = run_for(build("calm", []), max(seconds), max(trial.view.steps_done for trial in trials))
        rows = []
        for trial, limit_s in zip(trials, seconds, strict=True):
            differences = compare_runs(
                trial.history.losses, calm.history.losses, trial.checkpoints, calm.checkpoints
            )
            done, recovered = count_steps(trial, limit_s), trial.view.of("recovered")
            rows.append(
                {
                    "kills": len(trial.injections),
                    "seconds": limit_s,
                    "steps": done,
                    "fault_free_steps": count_steps(calm, limit_s),
                    "share": done / count_steps(calm, limit_s),
                    "share_by_own_rate": done / (limit_s * measure_own_rate(trial)),
                    "mean_recovery_s": sum(e["seconds"] for e in recovered) / max(1, len(recovered)),
                    "violations": [*calm.violations, *trial.violations, *differences],
                }
            )
        return rows


def main() -> None:
    """Print one line per seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--gap", type=float, default=9.0, help="mean seconds between two kills")
    parser.add_argument("--seconds", type=float, help="kill for this time instead of a number of times")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layout", choices=list(LAYOUTS), default="ddp")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    kills = chosen.kills if chosen.seconds is None else None
    schedules = [build_schedule(seed, chosen.gap, kills, chosen.seconds) for seed in range(chosen.seeds)]
    lengths = [chosen.seconds or (one[-1].after_s or 0.0) + chosen.gap for one in schedules]
    rows = measure(chosen.layout, schedules, lengths)
    result = {
        "date": str(datetime.datetime.now(tz=datetime.UTC).date()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}",
        "load_average": os.getloadavg()[2],
        "layout": chosen.layout,
        "target": TARGET_KILLS if kills is not None else TARGET_LOOP,
        "rows": rows,
    }
    if chosen.json:
        print(json.dumps(result))
        return
    print(f"{result['layout']}, {result['date']}, {result['machine']}, load {result['load_average']:.1f}")
    for row in rows:
        shares = f"share {row['share']:.1%}, by own rate {row['share_by_own_rate']:.1%}"
        figures = f"{row['kills']} kills in {row['seconds']:.0f} s: {row['steps']} steps, {shares}"
        equal = "bit-identical" if not row["violations"] else f"FAILED: {row['violations']}"
        print(f"  {figures}, mean recovery {row['mean_recovery_s']:.2f} s, {equal}")
    print(f"  target: at least {result['target']:.0%}")


if __name__ == "__main__":
    main()
