"""Starts ``meshwright`` in a subprocess and reads its events while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network_nodes import Nodes, find_obstacle
from running_command import Command


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
