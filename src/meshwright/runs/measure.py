"""Runs a plan for a few steps with the real launcher, in a temporary folder, for benchmarks."""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.audit.event_scan import Attempt
from meshwright.core.errors import Problem, name_interruption
from meshwright.core.events import Event
from meshwright.launch.assignment import Assignment
from meshwright.plan.contract import PLAN_FILE, PlanContract, write_plan
from meshwright.runs.ranks import build_launch
from meshwright.spec.cluster import count_cores
from meshwright.spec.execution import uses_torch_compile

ENTRY = "meshwright.verify.bench.scaling:run_rank"


@dataclass
class MeasuredRun:
    """Reports of the ranks of one plan."""

    attempt: Attempt = field(default_factory=lambda: Attempt(0))
    times: dict[int, Event] = field(default_factory=dict)
    steps: int = 0

    def feed(self, event: Event) -> None:
        """Take in one event."""
        self.attempt.feed(event)
        if event["event"] == "scaling":
            self.times[event["rank"]] = event
        elif event["event"] == "step" and event["rank"] == 0:
            self.steps += 1


def measure_plan(
    plan: PlanContract, data_dir: Path, name: str, show: Callable[[str, int], None]
) -> MeasuredRun:
    """Run a plan's steps. The folder stays only if a rank died: the error names its log.

    Args:
        plan: What to run, ``train.steps`` long.
        data_dir: Prepared data.
        name: Name in messages.
        show: Called with a text and the number of steps done.

    Raises:
        RunFailedError: A rank died.
        InterruptedRunError: Ctrl-C stopped it.
        RunFailedError: Another signal stopped it.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshwright-bench-"))
    write_plan(plan, folder / PLAN_FILE)
    Assignment(str(folder), str(data_dir.resolve()), str(folder / "checkpoints")).write()
    steps, measured = plan.job.train.steps, MeasuredRun()

    def listen(event: Event) -> None:
        measured.feed(event)
        if event["event"] == "ready" and event["rank"] == 0 and uses_torch_compile(plan.job):
            show(f"{name}: compiling with {plan.job.train.compile_backend}", 0)
        elif event["event"] == "step" and event["rank"] == 0:
            show(f"{name}: {measured.steps} of {steps} steps", measured.steps)

    stops = build_launch(ENTRY, plan.job, folder, listen).run()
    shutil.rmtree(folder, ignore_errors=True)
    if stops:
        raise name_interruption(stops, Problem("bench-interrupted", f"interrupted while measuring {name}"))
    return measured


def describe_machine(plan: PlanContract, attempt: Attempt) -> dict[str, Any]:
    """The machine that the figures were measured on."""
    cluster = plan.job.cluster
    return {
        "host": attempt.host or platform.node(),
        "processor": processor_name(),
        "cores": count_cores(),
        "device": cluster.device,
        "device_name": cluster.device_name,
        "devices": cluster.world_size,
        "python": platform.python_version(),
        "torch": attempt.torch,
    }


def processor_name() -> str:
    """Name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
