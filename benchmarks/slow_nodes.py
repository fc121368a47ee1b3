"""Two network namespaces of this machine as nodes with slow links, for benchmarks of several nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.runs.faults.checks.network_nodes import Nodes

NODES = 2
INTERFACE = "net0"
"""Network interface of each namespace."""


@contextmanager
def slow_nodes(mbit: float, folder: Path) -> Iterator[Nodes]:
    """Two namespaces; each sends at this rate at most."""
    nodes = Nodes(NODES, folder)
    try:
        nodes.create()
        for name in nodes.names:
            limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *limit], check=True)
        yield nodes
    finally:
        nodes.remove()
