"""Prints the outputs that docs/hangs.md and docs/outputs.md quote: real runs on CPU ranks, with a fault each.

    python benchmarks/hang_examples.py stopped     # meshwright hang of a run whose rank 1 is stopped
    python benchmarks/hang_examples.py skipped     # a rank skips an all-reduce
    python benchmarks/hang_examples.py shape       # one of three ranks passes another shape
    python benchmarks/hang_examples.py data        # a rank waits for its samples
    python benchmarks/hang_examples.py recovery    # two kills, a stop and a resume: goodput and its picture

``make docs-measured PAGES="hangs.md outputs.md"`` puts the outputs into the pages. The faults are those of
the tests (``tests/multiproc/injected_faults.py``).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from docs_figures import FILE, shrink

from meshwright import load_run
from meshwright.cli import main as run_command
from meshwright.report.figure import save_figure
from meshwright.report.generation_plot import draw_generations

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "multiproc"
LIMIT_S = 120.0

Event = dict[str, Any]


def shorten(text: str) -> str:
    """The text without the folders of this checkout and of the run."""
    for folder in (f"{ROOT}/src/", f"{FAULTS}/", f"{Path.cwd()}/"):
        text = text.replace(folder, "")
    return text.rstrip()


def train_with_fault(fault: str, *overrides: str) -> list[str]:
    """The lines that ``meshwright train`` prints with a fault in its ranks."""
    printed = io.StringIO()
    arguments = ["meshwright", "train", "job.toml", "run_dir=run", *overrides]
    sys.path.insert(0, str(FAULTS))
    with (
        mock.patch("meshwright.runs.train.ENTRY", f"injected_faults:{fault}"),
        mock.patch("sys.argv", arguments),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        run_command()
    return shorten(printed.getvalue()).splitlines()


def print_error(fault: str, ranks: int) -> None:
    """The error of a run that a fault ended."""
    lines = train_with_fault(fault, f"layout.dp_replicate={ranks}", "train.global_batch=12")
    print(next(line for line in lines if line.startswith("error: ")))


def print_warning() -> None:
    """The warning about a rank that waits for data; the timeout of the other's collective ends the run."""
    limits = ("elastic.collective_timeout_s=15", "elastic.restarts=0")
    lines = train_with_fault("stuck_in_data_in_step_4", "layout.dp_replicate=2", *limits)
    print(next(line for line in lines if line.startswith("warning: rank")))


class Training:
    """``meshwright train`` in a process of its own."""

    def __init__(self, *overrides: str, folder: str = "run") -> None:
        """Start it.

        Args:
            overrides: Of the job's keys.
            folder: Of the run; ``runs/job-1`` is the one that it chooses itself.
        """
        self._folder = Path(folder)
        named = () if folder == "runs/job-1" else (f"run_dir={folder}",)
        command = [sys.executable, "-m", "meshwright", "train", "job.toml", "layout.dp_replicate=2"]
        self.process = subprocess.Popen(
            [*command, *named, *overrides],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event that is wanted."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for event in self._read_events():
                if wanted(event):
                    return event
            time.sleep(0.01)
        raise RuntimeError("the run did not get there")

    def wait_for_step(self, step: int, generation: int = 0) -> None:
        """Wait until rank 0 has done a step."""
        self.wait_for(
            lambda e: (e["event"], e["rank"], e["generation"], e.get("step")) == ("step", 0, generation, step)
        )

    def send(self, rank: int, number: int) -> None:
        """Send a signal to the newest process of a rank."""
        pids = [e["pid"] for e in self._read_events() if e["event"] == "started" and e["rank"] == rank]
        os.kill(pids[-1], number)

    def _read_events(self) -> list[Event]:
        """The events of the run so far."""
        path = self._folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def print_stopped() -> None:
    """``meshwright hang`` of a run whose rank 1 is stopped."""
    training = Training("train.steps=100000", "elastic.heartbeat_timeout_s=30")
    try:
        training.wait_for_step(14)
        training.send(1, signal.SIGSTOP)
        hang = [sys.executable, "-m", "meshwright", "hang", "run"]
        done = subprocess.run(hang, capture_output=True, text=True, check=True)
        print(f"$ meshwright hang run\n{shorten(done.stdout)}")
    finally:
        training.send(1, signal.SIGCONT)
        training.process.send_signal(signal.SIGTERM)
        training.process.wait()


def print_recovery() -> None:
    """Goodput of a run with two kills, a stop and a resume; draws its generations."""
    options = ("train.steps=60", "elastic.snapshot_every=5", "train.eval_every=20")
    training = Training(*options)
    training.wait_for_step(23)
    training.send(1, signal.SIGKILL)
    training.wait_for_step(41, generation=1)
    training.send(0, signal.SIGKILL)
    training.wait_for_step(52, generation=2)
    training.process.send_signal(signal.SIGTERM)
    training.process.wait()
    Training(*options, "--resume").process.wait()
    run = load_run("run")
    assert run.audit().ok, run.audit().differences
    for name, value in run.report().facts():
        if name in ("Steps", "Recoveries", "Goodput", "Took"):
            print(f"{name:<10}  {value}")
    times = run.record.clock.generations
    picture = ROOT / "docs" / "figures" / "generations.png"
    save_figure(draw_generations([times[number] for number in sorted(times)]), picture)
    shrink(picture)


EXAMPLES: dict[str, Callable[[], None]] = {
    "stopped": print_stopped,
    "skipped": lambda: print_error("skipped_all_reduce_in_step_4", ranks=2),
    "shape": lambda: print_error("other_shape_in_step_4", ranks=3),
    "data": print_warning,
    "recovery": print_recovery,
}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, content in FILE.findall((ROOT / "README.md").read_text()):
            Path(name).write_text(content)
        Path("examples").symlink_to(ROOT / "examples")
        print(f"example: {sys.argv[1]}\n", flush=True)
        EXAMPLES[sys.argv[1]]()
