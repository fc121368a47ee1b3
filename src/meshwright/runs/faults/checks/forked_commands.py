"""Runs many ``meshwright`` commands quickly: torch is imported once, and each command is a forked process.

``python -m meshwright.runs.faults.checks.forked_commands`` reads commands from standard input, a JSON list
per line, and answers each with a line of JSON: status, messages and peak memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PRELOAD = (
    "torch",
    "tokenizers",
    "safetensors.torch",
    "meshwright.cli.app",
    "meshwright.cli.checkpoint",
    "meshwright.cli.generate",
    "meshwright.cli.train",
    "meshwright.checkpoint.hf.export",
    "meshwright.runs.checkpoints",
    "meshwright.runs.generate",
    "meshwright.runs.train",
    "meshwright.train.generate",
)
"""Imports of the commands: the slow part of each."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    output: str
    """Output and messages."""
    peak_bytes: int


class ForkedCommands:
    """Commands in one working folder."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder: Path) -> Iterator[ForkedCommands]:
        """Import torch in another process; it ends with the block."""
        server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            yield cls(server)
        finally:
            server.communicate()

    def run(self, arguments: Sequence[str]) -> Ended:
        """Run one command to its end."""
        assert self._server.stdin is not None, "a pipe"
        assert self._server.stdout is not None, "a pipe"
        self._server.stdin.write(json.dumps(list(arguments)) + "\n")
        self._server.stdin.flush()
        return Ended(**json.loads(self._server.stdout.readline()))

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Status and messages of one command."""
        ended = self.run(arguments)
        return ended.status, ended.output


def _serve() -> None:
    for name in PRELOAD:
        with contextlib.suppress(ImportError):  # some packages are optional
            importlib.import_module(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                _run_child(json.loads(line), output.fileno())
            _, status, usage = os.wait4(child, 0)
            output.seek(0)
            text = output.read().decode(errors="replace")
        ended = Ended(os.waitstatus_to_exitcode(status), text, usage.ru_maxrss * 1024)
        sys.stdout.write(json.dumps(ended.__dict__) + "\n")
        sys.stdout.flush()


def _run_child(arguments: list[str], output: int) -> None:
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["meshwright", *arguments]
        runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    except BaseException as error:
        sys.stderr.write(f"Traceback: {error!r}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
