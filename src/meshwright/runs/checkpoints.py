"""Finds, prunes and exports the checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.inventory import PruneResult, find_root, prune
from meshwright.checkpoint.manifest import MANIFEST, find_newest
from meshwright.checkpoint.retention import Retention
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE
from meshwright.core.packages import require_packages
from meshwright.launch.environment import prepare_environment
from meshwright.launch.lock import RunLock
from meshwright.spec.cluster import count_cores

if TYPE_CHECKING:
    from meshwright.checkpoint.hf.export import Exported


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a folder or a run.

    Raises:
        UserError: There is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for root in (path, path / "checkpoints"):
        found = find_newest(root)
        if found is not None:
            return found[0]
    rule = "holds no checkpoint" if path.exists() else "does not exist"
    fix = "Give a checkpoint, a folder of checkpoints, or the folder of a run"
    raise UserError(Problem("checkpoint-missing", rule, path=str(path), fix=fix))


def prune_folder(path: Path, retention: Retention) -> PruneResult:
    """Delete old checkpoints of a folder that no run is writing to.

    Raises:
        UserError: A run is writing to the folder, or it cannot be locked.
    """
    root = find_root(path)
    runs = [folder for folder in (root, root.absolute().parent) if (folder / EVENTS_FILE).exists()]
    with contextlib.ExitStack() as locks:
        if runs:
            locks.enter_context(_lock(RunLock.take, runs[0]))
        locks.enter_context(_lock(RunLock.take_checkpoints, root))
        # Drafts of a folder without a run may be another process's.
        return prune(root, retention, sweep=bool(runs))


def _lock(take: Callable[[Path], RunLock], folder: Path) -> RunLock:
    try:
        return take(folder)
    except OSError as error:
        rule, fix = f"cannot be locked: {error.strerror or error}", "Use an account that may write there"
        raise UserError(Problem("checkpoint-not-removed", rule, path=str(folder), fix=fix)) from None


def export_to(checkpoint: Path, out: Path, dtype: str | None, shard_bytes: int) -> Exported:
    """Write a checkpoint as a Hugging Face folder."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="exporting a checkpoint")
    prepare_environment(threads=count_cores())
    from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: PLC0415  (torch)

    return export_checkpoint(checkpoint, out, dtype, max(1, shard_bytes))
