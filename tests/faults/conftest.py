"""Starts ``meshwright`` in a subprocess and reads its events while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from golden_job import JOB, save_golden
from network_nodes import Nodes, find_obstacle
from running_command import Command

from meshwright.cli import main


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start a command in the test's folder; it is killed at the end of the test if it still runs."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command([str(a) for a in arguments], tmp_path))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
        for stream in (one.process.stdout, one.process.stderr):
            stream.close()


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    """Make machines, as network namespaces; they are removed at the end, with all their processes."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    made: list[Nodes] = []

    def make(count: int) -> Nodes:
        made.append(Nodes(count, tmp_path))
        made[-1].create()
        return made[-1]

    yield make
    for nodes in made:
        nodes.remove()


@pytest.fixture
def checkpoint(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good checkpoint, in the folder of a job that can resume it."""
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "job.toml").write_text(JOB.format(corpus=prepared))
    return save_golden(folder / "root", prepared)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``run("checkpoint", "verify", "root")``: status and messages of a command in this process."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["meshwright", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_of:
            main()
        out, err = capfd.readouterr()
        return int(exit_of.value.code or 0), out + err

    return run
