"""Writes cluster files, which ``cluster.file`` names: what ``tune`` fits and ``probe`` measures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tomli_w

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.spec.cluster import Cluster
from meshwright.spec.load import drop_none

WRITTEN_BY = "# Written by meshwright"
"""Start of a cluster file that may be overwritten."""


def require_writable(out: Path, command: str) -> None:
    """Check before anything is measured that the file can be written.

    A file written by hand or by the other command is kept: ``tune`` does not write what ``probe`` measures.

    Args:
        out: The file.
        command: ``tune`` or ``probe``.
    """
    if not can_write(out):
        rule, fix = "cannot be written", "Choose another file"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out), fix=fix))
    there = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    if there and not there.startswith(f"{WRITTEN_BY} {command}"):
        who = "another command" if there.startswith(WRITTEN_BY) else "hand"
        rule, fix = f"already exists, written by {who}", "Choose another file"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out), fix=fix))


def write_cluster(out: Path, cluster: Cluster, command: str) -> None:
    """Write a cluster file.

    Args:
        out: The file.
        cluster: With its basis.
        command: ``tune`` or ``probe``.
    """
    try:
        out.write_text(cluster_text(cluster, command), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise UserError(Problem("cluster-file-not-writable", rule, path=str(out))) from None


def cluster_text(cluster: Cluster, command: str) -> str:
    """The content of a cluster file."""
    fields = {k: v for k, v in drop_none(dataclasses.asdict(cluster)).items() if k != "file"}
    return f"{WRITTEN_BY} {command}. Use it with cluster.file=...\n{tomli_w.dumps(fields)}"
