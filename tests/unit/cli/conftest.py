"""Runs the command line inside the test process, through the same ``main`` as the installed command."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from job_texts import TINY_ON_H100
from meshwright.cli import main

GOLDEN_RUN = Path(__file__).parents[2] / "golden" / "run-v1"


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output. Fails if it is not exactly one line of strict JSON."""
        assert self.out.count("\n") == 1, f"not one line: {self.out!r}"

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        found = json.loads(self.out, parse_constant=refuse)
        assert isinstance(found, dict), f"not an object: {self.out!r}"
        return found

    @property
    def codes(self) -> list[str]:
        """The error codes at the ends of the error lines."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert all(line.endswith("]") for line in lines), self.err
        return [line.rpartition("[")[2][:-1] for line in lines]


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> Callable[..., CommandResult]:
    """``cli("plan", "tiny", "--json")``: runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["meshwright", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_of:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return CommandResult(exit_of.value.code, out, err)

    return run


@pytest.fixture
def good(tmp_path) -> str:
    """A valid job file."""
    path = tmp_path / "good.toml"
    path.write_text(TINY_ON_H100)
    return str(path)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A copy of the golden run, which a test may change."""
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN_RUN, folder)
    return folder
