"""The file that ``cluster.file`` names, as ``tune`` and ``probe`` write it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tomli_w

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.spec.cluster import Cluster

WRITTEN_BY = "# Written by meshwright"
"""First words of a cluster file that may be written over."""


def require_writable(out: Path, command: str) -> None:
    """Whether the file can be written is known before anything is measured; one made by hand is kept.

    So is one of another command: what ``probe`` measured is not in what ``tune`` writes.

    Args:
        out: The file.
        command: Who wants to write it.
    """
    if not can_write(out):
        rule, fix = "cannot be written", "Name another file with -o"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out), fix=fix))
    there = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    if there and not there.startswith(f"{WRITTEN_BY} {command}"):
        who = "another command" if there.startswith(WRITTEN_BY) else "somebody else"
        rule, fix = f"is there already, written by {who}", "Name another file with -o"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out), fix=fix))


def write_cluster(out: Path, cluster: Cluster, command: str) -> None:
    """Write it.

    Args:
        out: Where.
        cluster: With its basis.
        command: Whose file it is.
    """
    try:
        out.write_text(cluster_text(cluster, command), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out))) from None


def cluster_text(cluster: Cluster, command: str) -> str:
    """What is in it."""
    fields = {k: v for k, v in dataclasses.asdict(cluster).items() if v is not None and k != "file"}
    return f"{WRITTEN_BY} {command}. Use it with cluster.file=...\n{tomli_w.dumps(fields)}"
