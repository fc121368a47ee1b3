"""A ``meshwright`` command in a process of its own, and the events of its run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.core.events import EVENTS_FILE
from meshwright.runs.faults.checks.check import require

PROGRAM = (sys.executable, "-m", "meshwright")
POLL_S = 0.02


class Command:
    """A running command; ``wait_for`` waits for an event."""

    def __init__(self, arguments: Sequence[str], folder: Path, program: Sequence[str] = PROGRAM) -> None:
        self.arguments, self.folder = tuple(arguments), folder
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def events(self, run_dir: Path) -> list[dict[str, Any]]:
        """The events that the run has written so far."""
        return read_events(run_dir)

    def wait_for(
        self, run_dir: Path, wanted: Callable[[dict[str, Any]], bool], limit_s: float = 60
    ) -> dict[str, Any]:
        """The first event of a kind; the command must not end before."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for event in self.events(run_dir):
                if wanted(event):
                    return event
            if self.process.poll() is not None:
                output = self.process.communicate()[1]
                require(False, f"the command ended with status {self.process.returncode}: {output}")
            time.sleep(POLL_S)
        require(False, f"no such event within {limit_s:g} s")
        raise AssertionError("required before")

    def finish(self, limit_s: float = 90) -> tuple[int, str, str]:
        """Wait for its end; returns status, output and messages."""
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run so far, without half a line at the end."""
    try:
        lines = (run_dir / EVENTS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """``start("train", ...)`` starts a command in a folder; all are ended in the end."""
    started: list[Command] = []

    def start(*arguments: object, program: Sequence[str] = PROGRAM) -> Command:
        started.append(Command([str(a) for a in arguments], folder, program))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.close()
