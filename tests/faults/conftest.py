"""Starts ``meshwright`` in a subprocess and reads its events while it runs."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from golden_job import JOB, save_golden

from meshwright.cli import main
from meshwright.runs.faults.checks import failing_disk
from meshwright.runs.faults.checks.check import CannotRunError, CheckRun
from meshwright.runs.faults.checks.network_nodes import Nodes, require_namespaces
from meshwright.runs.faults.checks.running_command import Command, commands


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that this machine cannot run is skipped with the reason."""
    try:
        return (yield)
    except CannotRunError as error:
        pytest.skip(str(error))


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start a command in the test's folder; it is killed at the end of the test if it still runs."""
    with commands(tmp_path) as start:
        yield start


@pytest.fixture
def check(tmp_path: Path) -> CheckRun:
    """A run of a fault test of ``meshwright faults``."""
    seed = int(os.environ.get("CHECKPOINT_FAULTS_SEED") or random.SystemRandom().randrange(2**32))
    sys.stdout.write(f"CHECKPOINT_FAULTS_SEED={seed}\n")
    folder = tmp_path / "check"
    folder.mkdir()
    return CheckRun(folder, random.Random(seed))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``small_disk("6m")``: a file system of 6 MB."""
    with contextlib.ExitStack() as stack:

        def mount(size: str) -> Path:
            return stack.enter_context(failing_disk.small_disk(tmp_path / "disk", size))

        yield mount


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[Callable[[int], Nodes]]:
    """Make machines, as network namespaces; they are removed at the end, with all their processes."""
    try:
        require_namespaces()
    except CannotRunError as error:
        pytest.skip(str(error))
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
