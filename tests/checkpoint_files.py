"""Checkpoints of a few tensors, written by ranks in this process: those of ``meshwright faults``."""

from __future__ import annotations

from pathlib import Path

from meshwright.runs.faults.checks.small_checkpoints import (
    TENSORS,
    SmallSaver,
    build_write,
    save,
    split_rows,
)
from meshwright.runs.faults.checks.small_checkpoints import build_manifest as manifest_of

__all__ = ["TENSORS", "build_saver", "build_write", "manifest_of", "save", "split_rows"]


def build_saver(root: Path, events: list, generation: int = 0, **settings) -> SmallSaver:
    """The saver of one rank whose state is a few tensors; it appends name and fields of its events."""
    saver = SmallSaver(root, events, generation, **settings)
    saver.tensors = TENSORS  # a test may have replaced them
    return saver
