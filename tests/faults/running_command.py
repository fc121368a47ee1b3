"""A ``meshwright`` subprocess, and the events of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRAM = (sys.executable, "-m", "meshwright")


class Command:
    """A running ``meshwright`` subprocess; ``wait_for`` waits for an event."""

    def __init__(self, arguments: list[str], folder: Path, program: Sequence[str] = PROGRAM) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def events(self, run_dir: Path) -> list[dict[str, Any]]:
        try:
            lines = (run_dir / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for(
        self, run_dir: Path, wanted: Callable[[dict[str, Any]], bool], limit_s: float = 60
    ) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for event in self.events(run_dir):
                if wanted(event):
                    return event
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}: {self.process.communicate()[1]}")
            time.sleep(0.02)  # polls the file
        raise AssertionError(f"no such event within {limit_s} s")

    def finish(self, limit_s: float = 90) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err
