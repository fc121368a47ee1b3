"""Error of the simulated pipeline bubble against the measured one, for every schedule.

The stages sleep instead of computing. With more ranks than cores, other ranks would compute during a bubble,
so it could not be measured; a sleeping rank needs no core. Interpreter and transfers between processes are
those of training. All ranks record the start and end of their actions on one clock. The measured bubble is
the idle share of all ranks' time from the first start to the last end, the median over some steps. The
simulated bubble is that of ``walk_schedule`` with the sleep times as stage times and the transfer time
measured just before.

    python benchmarks/pipeline_bubble.py [--ranks 4] [--schedule zbv] [--picture FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.launch.environment import prepare_environment

os.environ["OMP_NUM_THREADS"] = "1"
prepare_environment(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from meshwright.measure.collective_counter import CollectiveCounter  # noqa: E402
from meshwright.parallel.mesh import Mesh, destroy_mesh, init_mesh  # noqa: E402
from meshwright.parallel.pipeline.action_times import ActionTimes  # noqa: E402
from meshwright.parallel.pipeline.interpreter import Interpreter  # noqa: E402
from meshwright.parallel.pipeline.p2p import P2PExchange  # noqa: E402
from meshwright.plan.build import build_plan  # noqa: E402
from meshwright.plan.contract import PLAN_FILE, read_plan, write_plan  # noqa: E402
from meshwright.report.timeline import build_timeline, measured_timeline, write_timelines  # noqa: E402
from meshwright.runs.ranks import build_launch  # noqa: E402
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule  # noqa: E402
from meshwright.schedule.pipeline.build import build_schedule  # noqa: E402
from meshwright.schedule.pipeline.walk import StageTimes, Walk, walk_schedule  # noqa: E402
from meshwright.spec.layout import SCHEDULES  # noqa: E402
from meshwright.spec.load import build_job  # noqa: E402

SHAPE = (8, 64)
"""Shape of the activations: 2 KiB, so that a transfer takes almost no time."""
MESSAGES, PAUSE_S = 15, 0.01
"""Messages of each of two ranks to measure a transfer."""
TARGET = 0.10
FORWARD, BACKWARD, WEIGHT = 1.0, 1.5, 1.0
"""Times of a stage's actions, in forward passes."""
UNEVEN = 0.5
"""Extra time of the last stage over the first with uneven stages; linear in between."""

Span = tuple[Action, float, float]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    schedule: str
    pp: int
    micro_batches: int
    even: bool
    forward_s: float
    """Forward time of the first stage."""

    def build(self) -> PipelineSchedule:
        """The schedule."""
        return build_schedule(self.schedule, self.pp, self.micro_batches)

    def times(self) -> StageTimes:
        """Sleep time of each stage; a rank with two stages has half of the work in each."""
        schedule = self.build()
        last, share = schedule.stages - 1, self.forward_s / schedule.virtual_stages
        slower = [1.0 if self.even else 1.0 + UNEVEN * stage / last for stage in range(schedule.stages)]
        return StageTimes(*([share * s * part for s in slower] for part in (FORWARD, BACKWARD, WEIGHT)))

    def walk(self, transfer_s: float) -> Walk:
        """The simulated schedule."""
        return walk_schedule(self.build(), self.times(), transfer_s)


class SleepingStages:
    """Stages that sleep instead of computing."""

    def __init__(self, schedule: PipelineSchedule, times: StageTimes) -> None:
        self._forward_s, self._input_s, self._weight_s = (
            list(values)  # type: ignore[arg-type]
            for values in (times.forward_s, times.backward_input_s, times.backward_weight_s)
        )
        self._last, self._split = schedule.stages - 1, schedule.split_backward

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """A forward pass."""
        time.sleep(self._forward_s[stage])
        return None if stage == self._last else torch.full(SHAPE, float(micro_batch))

    def backward(self, stage: int, micro_batch: int, grad: Tensor | None) -> Tensor | None:
        """A backward pass, of both parts if it is not split."""
        time.sleep(self._input_s[stage] + (0.0 if self._split else self._weight_s[stage]))
        return torch.full(SHAPE, float(micro_batch)) if stage else None

    def weight(self, stage: int, micro_batch: int) -> None:
        """The weight-gradient pass."""
        time.sleep(self._weight_s[stage])


class ClockTimes(ActionTimes):
    """Action times of one step on the machine's clock, which all ranks share."""

    started = 0.0

    def begin(self) -> None:
        """A step begins."""
        super().begin()
        self.started = time.perf_counter()

    def rows(self) -> list[list[Any]]:
        """Kind, stage, micro-batch, start and end of each action."""
        return [[*action, self.started + start, self.started + end] for *action, start, end in super().rows()]


@dataclass(frozen=True)
class Measurement:
    """Measurements of a case."""

    transfer_s: float
    steps: list[list[list[Span]]]
    """For each step and rank, start and end of each action."""

    def median_step(self) -> list[list[Span]]:
        """The step with the median bubble."""
        return sorted(self.steps, key=measure_bubble)[(len(self.steps) - 1) // 2]


def run_case(case: Case, mesh: Mesh, steps: int) -> dict[str, Any]:
    """On one rank: start and end of each action in each step, and the time of a transfer."""
    schedule = case.build()
    row, stages = schedule.ranks[mesh.pp_rank], SleepingStages(schedule, case.times())
    exchange = P2PExchange(schedule, mesh, SHAPE, torch.float32)
    transfer_s, found = time_transfer(mesh), []
    for _ in range(steps):
        times = ClockTimes(row, mesh.device)
        interpreter = Interpreter(schedule, mesh.pp_rank, exchange, times)
        dist.barrier()
        interpreter.run(stages)
        found.append(times.rows())
    return {"transfer_s": transfer_s, "steps": found}


def measure_bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The idle share of all ranks' time, from the first start to the last end."""
    times = [(start, end) for row in spans for _, start, end in row]
    work_s = sum(end - start for start, end in times)
    makespan_s = max(end for _, end in times) - min(start for start, _ in times)
    return 1 - work_s / (len(spans) * makespan_s)


def time_transfer(mesh: Mesh) -> float:
    """Seconds of a message from a rank that has slept to one that waits; mean over both directions.

    The first two ranks send; all get the result.
    """
    group, seconds = mesh.pp_group(0, 1), torch.zeros((), dtype=torch.float64)
    if mesh.pp_rank < 2:
        took = []
        for number in range(2 * MESSAGES):
            message = torch.zeros((), dtype=torch.float64)
            if mesh.pp_rank == number % 2:
                time.sleep(PAUSE_S)
                message += time.perf_counter()
                dist.send(message, group=group, group_dst=1 - mesh.pp_rank)
            else:
                dist.recv(message, group=group, group_src=1 - mesh.pp_rank)
                took.append(time.perf_counter() - message.item())
        seconds += statistics.median(took)
    dist.all_reduce(seconds)
    return seconds.item() / 2


def run_rank(run_dir: str, listener: Any = None) -> int:
    """One rank, through all cases; writes its measurements."""
    folder = Path(run_dir)
    job = read_plan(folder / PLAN_FILE).job
    task = json.loads((folder / "task.json").read_text())
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(job, counter)
    found = [run_case(Case(**case), mesh, task["steps"]) for case in task["cases"]]
    (folder / f"measured-{mesh.rank}.json").write_text(json.dumps(found))
    destroy_mesh(mesh)
    counter.remove()
    return 0


def run_cases(cases: Sequence[Case], steps: int, folder: Path) -> list[Measurement]:
    """Run cases with the same number of ranks."""
    pp = cases[0].pp
    tree = {
        "model": {"preset": "tiny", "num_layers": 2 * pp},
        "data": {"path": "none", "seq_len": 32},
        "train": {"steps": 1, "global_batch": 2 * pp},
        "layout": {"pp": pp, "micro_batch": 1},
        "cluster": {"device": "cpu", "devices_per_node": pp, "matmul_flops_per_s": 1e11},
    }
    plan, _ = build_plan(build_job(tree))
    folder.mkdir()
    write_plan(plan, folder / PLAN_FILE)
    (folder / "task.json").write_text(json.dumps({"steps": steps, "cases": [vars(case) for case in cases]}))
    build_launch("pipeline_bubble:run_rank", plan.job, folder, lambda event: None).run()
    by_rank = [json.loads((folder / f"measured-{rank}.json").read_text()) for rank in range(pp)]
    return [_join(found) for found in zip(*by_rank, strict=True)]


def _join(by_rank: Sequence[dict[str, Any]]) -> Measurement:
    """The measurements of all ranks of one case."""
    by_step = zip(*(found["steps"] for found in by_rank), strict=True)
    return Measurement(by_rank[0]["transfer_s"], [[_read_spans(row) for row in rows] for rows in by_step])


def _read_spans(row: list[list[Any]]) -> list[Span]:
    return [(Action(Kind(kind), stage, m), start, end) for kind, stage, m, start, end in row]


def compare(case: Case, measurement: Measurement) -> dict[str, Any]:
    """A row of the table."""
    simulated = case.walk(measurement.transfer_s).bubble
    measured = measure_bubble(measurement.median_step())
    return {
        **vars(case),
        "transfer_s": measurement.transfer_s,
        "simulated": simulated,
        "measured": measured,
        "difference": (measured - simulated) / simulated,
    }


def draw(case: Case, measurement: Measurement, folder: Path) -> None:
    """Plot the simulated schedule above the measured one."""
    schedule, walk = case.build(), case.walk(measurement.transfer_s)
    spans = measurement.median_step()
    stages = "even" if case.even else "uneven"
    title = f"{case.schedule}, {case.pp} ranks, {stages} stages"
    upper = build_timeline(schedule, walk, f"{title}: simulated", f"bubble {walk.bubble:.1%}", unit="s")
    note = f"bubble {measure_bubble(spans):.1%}"
    lower = measured_timeline(schedule, spans, f"{title}: measured with sleeping stages", note)
    write_timelines(folder / f"{case.schedule}-{case.pp}-{stages}.svg", upper, lower)


def main() -> None:
    """Print the table and its worst row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=(2, 4), action="append")
    parser.add_argument("--schedule", choices=SCHEDULES, action="append")
    parser.add_argument(
        "--forward-ms", type=float, default=100.0, help="forward time of all stages of a rank"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps per case; the median bubble is reported")
    parser.add_argument("--picture", type=Path, help="folder for a plot of each row")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    rows = []
    for pp in arguments.ranks or (2, 4):
        cases = [
            Case(name, pp, 2 * pp, even, arguments.forward_ms / 1e3)
            for name in arguments.schedule or SCHEDULES
            for even in (True, False)
        ]
        with tempfile.TemporaryDirectory() as place:
            found = run_cases(cases, arguments.steps, Path(place) / "run")
        for case, measurement in zip(cases, found, strict=True):
            rows.append(compare(case, measurement))
            if arguments.picture:
                arguments.picture.mkdir(parents=True, exist_ok=True)
                draw(case, measurement, arguments.picture)
    show(rows, arguments.json)


def show(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print as text or as one JSON object."""
    date = datetime.datetime.now(tz=datetime.UTC).date()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    if as_json:
        print(json.dumps({"date": str(date), "machine": machine, "rows": rows}))
        return
    print(f"pipeline bubbles of sleeping stages, {date}, {machine}")
    for row in rows:
        stages = "even" if row["even"] else "uneven"
        print(
            f"  {row['schedule']:11} {row['pp']} ranks, {row['micro_batches']:2} micro-batches, {stages:6} "
            f"stages: simulated {row['simulated']:6.2%} ({row['transfer_s'] * 1e3:.2f} ms per transfer), "
            f"measured {row['measured']:6.2%}, difference {row['difference']:+.1%}"
        )
    worst = max(rows, key=lambda row: abs(row["difference"]))
    print(
        f"  worst difference {worst['difference']:+.1%} ({worst['schedule']}, {worst['pp']} ranks)", end=" "
    )
    print(f"(target: at most {TARGET:.0%})")


if __name__ == "__main__":
    main()
