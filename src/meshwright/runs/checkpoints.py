"""Finds, prunes and exports the checkpoints of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.checkpoint.copying import copy_checkpoint
from meshwright.checkpoint.inventory import PruneResult, StoredCheckpoint, find_root, list_stored, prune
from meshwright.checkpoint.manifest import MANIFEST, read_manifest
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.stores import CheckpointStores, find_newest, unreachable_store
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE
from meshwright.core.object_path import AnyPath, ObjectPath, StoreError
from meshwright.core.packages import require_packages
from meshwright.core.units import format_bytes
from meshwright.launch.environment import prepare_environment
from meshwright.launch.lock import RunLock
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import count_cores

if TYPE_CHECKING:
    from meshwright.checkpoint.hf.export import Exported


@dataclass(frozen=True)
class CopiedCheckpoint:
    """One checkpoint, and its copy."""

    source: AnyPath
    copy: AnyPath | None
    """None if the target had the same checkpoint already."""
    bytes: int


def find_checkpoint(path: AnyPath) -> AnyPath:
    """The checkpoint that a path means: itself, or the newest of a folder, a run or an object store.

    Raises:
        UserError: There is none, or it cannot be read.
    """
    with _reading(path):
        if (path / MANIFEST).is_file():
            return path
        for root in (path, path / "checkpoints"):
            found = find_newest(root)
            if found is not None:
                return found[0]
        rule = "holds no checkpoint" if path.exists() else "does not exist"
    fix = "Give a checkpoint, a folder of checkpoints, or the folder of a run"
    raise UserError(Problem("checkpoint-missing", rule, path=str(path), fix=fix))


def require_folder(path: AnyPath) -> Path:
    """Refuse a checkpoint in an object store, where its files must be in a folder.

    Raises:
        UserError: It is in an object store.
    """
    if isinstance(path, ObjectPath):
        rule, fix = "is in an object store", f"Copy it first: meshwright checkpoint copy {path} FOLDER"
        raise UserError(Problem("checkpoint-not-local", rule, path=str(path), fix=fix))
    return path


def list_all(path: AnyPath, verify: bool, reporter: Reporter) -> list[StoredCheckpoint]:
    """The checkpoints at a path, oldest first; with a progress bar where their files are read."""
    with _reading(path):
        found = list_stored(path, verify=False)
        if not verify:
            return found
        verified = []
        with reporter.bar(len(found)) as show:
            for number, stored in enumerate(found):
                show(f"{stored.path.name}: {format_bytes(stored.bytes)}, starting", number)
                verified += list_stored(stored.path, verify=True) if stored.complete else [stored]
        return verified


def copy_checkpoints(
    source: AnyPath, target: AnyPath, every: bool, reporter: Reporter
) -> list[CopiedCheckpoint]:
    """Copy the newest checkpoint, or every intact one, to another folder or object store.

    Raises:
        UserError: There is none to copy, one does not verify, or the target cannot be written or is in use.
    """
    if every:
        paths = [
            stored.path for stored in list_all(source, verify=False, reporter=reporter) if stored.complete
        ]
    else:
        paths = [find_checkpoint(source)]
    with _lock_target(target), _reading(source):
        return [_copy(path, target, reporter) for path in paths]


def _copy(path: AnyPath, target: AnyPath, reporter: Reporter) -> CopiedCheckpoint:
    """Copy one checkpoint, with a progress bar."""
    total, done = sum(facts.bytes for facts in read_manifest(path, verify=False).files.values()), 0
    with reporter.bar(total) as show:
        show(f"{path.name}: {format_bytes(total)}, starting", 0)

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            show(f"{path.name}: {format_bytes(done)} of {format_bytes(total)}", done)

        try:
            return CopiedCheckpoint(path, copy_checkpoint(path, target, on_bytes), total)
        except OSError as error:
            rule = f"was not copied to {target}: {error.strerror or error}"
            fix = "Nothing of the copy is left there; try again when the target can be written"
            raise UserError(Problem("checkpoint-not-copied", rule, path=str(path), fix=fix)) from None


def _lock_target(target: AnyPath) -> contextlib.ExitStack:
    try:
        return CheckpointStores.single(target).open().locks
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Use an account that may write there"
        raise UserError(Problem("checkpoint-not-copied", rule, path=str(target), fix=fix)) from None


def prune_folder(path: AnyPath, retention: Retention) -> PruneResult:
    """Delete old checkpoints of a folder or an object store that no run is writing to.

    Raises:
        UserError: A run is writing to it, or it cannot be locked.
    """
    with _reading(path), contextlib.ExitStack() as locks:
        root = find_root(path)
        near = () if isinstance(root, ObjectPath) else (root, root.absolute().parent)
        runs = [folder for folder in near if (folder / EVENTS_FILE).exists()]
        try:
            if runs:
                locks.enter_context(RunLock.take(runs[0]))
            locks.enter_context(CheckpointStores.single(root).open().locks)
        except OSError as error:
            rule, fix = f"cannot be locked: {error.strerror or error}", "Use an account that may write there"
            raise UserError(Problem("checkpoint-not-removed", rule, path=str(root), fix=fix)) from None
        # Drafts of a folder without a run may be those of an older version, which did not lock it.
        return prune(root, retention, sweep=bool(runs) or isinstance(root, ObjectPath))


@contextlib.contextmanager
def _reading(path: AnyPath) -> Iterator[None]:
    """Report an object store that cannot be reached."""
    try:
        yield
    except StoreError as error:
        raise unreachable_store(path, f"cannot be used: {error}") from None


def export_to(
    checkpoint: AnyPath, out: Path, dtype: str | None, shard_bytes: int, reporter: Reporter
) -> Exported:
    """Write a checkpoint as a Hugging Face folder, with a progress bar."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="exporting a checkpoint")
    prepare_environment(threads=count_cores())
    from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: PLC0415  (torch)

    with _reading(checkpoint), reporter.bar(100) as show:

        def on_progress(done: int, total: int) -> None:
            show(f"{format_bytes(done)} of {format_bytes(total)}", 100 * done // max(1, total))

        return export_checkpoint(checkpoint, out, dtype, max(1, shard_bytes), on_progress)
