"""Paths in a job: relative to the job file in the file, and to the working folder on the command line.

A loaded job has absolute paths only. So a plan, which copies the job into another folder, names the same
files, and so do ranks and resumed runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.core.object_path import is_url

Tree = dict[str, Any]

PATH_KEYS = (
    "run_dir",
    "model.hf",
    "cluster.file",
    "data.path",
    "data.cache",
    "data.eval.path",
    "data.eval.template",
    "data.tokenizer",
    "data.template",
    "data.sources.path",
    "data.sources.template",
    "layout.schedule_file",
    "checkpoint.dir",
    "checkpoint.stores",
    "elastic.metrics_token_file",
)
"""Keys whose value is a path, or may be one."""

BUILTIN = "builtin:"
"""Start of the name of built-in data."""
PREPARED_INDEX = "index.json"
"""The index file of a folder of prepared data."""


def resolve_paths(tree: Tree, base: Path) -> None:
    """Make the relative paths of a job's tables absolute, in place.

    Args:
        tree: The tables of a job; values of a wrong type are left for validation.
        base: The folder that the paths are relative to.
    """
    for key in PATH_KEYS:
        *parents, leaf = key.split(".")
        for table in _tables(tree, parents):
            if (value := table.get(leaf)) is None:
                continue
            if isinstance(value, list):
                table[leaf] = [_make_absolute(leaf, entry, base) for entry in value]
            else:
                table[leaf] = _make_absolute(leaf, value, base)


def _make_absolute(leaf: str, value: Any, base: Path) -> Any:
    if isinstance(value, str) and value and _is_path(leaf, value):
        # Not Path.resolve: links stay, because caches are full of them.
        return os.path.abspath(base / os.path.expanduser(value))  # noqa: PTH100, PTH111
    return value


def _is_path(leaf: str, value: str) -> bool:
    """Whether a value is a path; tokenizers and templates may also be names."""
    if leaf == "tokenizer":
        return not value.startswith("bpe:") and ("/" in value or value.endswith(".json"))
    if leaf == "template":
        return "/" in value or "." in value
    return not value.startswith(BUILTIN) and not is_url(value)


def _tables(tree: Tree, parents: list[str]) -> Iterator[Tree]:
    """The table at a dotted path, or each table of a list of tables."""
    found: Any = tree
    for parent in parents:
        found = found.get(parent) if isinstance(found, dict) else None
    for table in found if isinstance(found, list) else [found]:
        if isinstance(table, dict):
            yield table
