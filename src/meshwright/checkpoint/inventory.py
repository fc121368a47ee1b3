"""Lists the checkpoints of a folder, intact or not, and prunes old ones; works without torch.

``manifest`` verifies them. A checkpoint that does not verify is never removed: it may be of another version.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.checkpoint.drafts import list_leftovers
from meshwright.checkpoint.manifest import (
    MANIFEST,
    best_checkpoint,
    list_checkpoints,
    parse_name,
    read_manifest,
    remove_checkpoint,
    sort_by_step,
)
from meshwright.checkpoint.retention import Retention
from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import AnyPath, ObjectPath, tree_bytes


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint, intact or not."""

    path: AnyPath
    step: int
    bytes: int
    """Size of all its files."""
    reason: str = ""
    """Why it cannot be used; empty if it can."""
    best: bool = False
    """Whether it is marked as the one with the lowest evaluation loss."""
    eval_loss: float | None = None

    @property
    def complete(self) -> bool:
        """Whether it can be used."""
        return not self.reason


@dataclass(frozen=True)
class PruneResult:
    """The checkpoints that were kept and removed."""

    kept: tuple[StoredCheckpoint, ...]
    removed: tuple[StoredCheckpoint, ...]
    broken: tuple[StoredCheckpoint, ...]
    """Kept, because they do not verify."""
    leftovers: tuple[AnyPath, ...]
    """Drafts of killed processes, removed."""
    freed_bytes: int


def list_stored(path: AnyPath, verify: bool) -> list[StoredCheckpoint]:
    """The checkpoints at a path, oldest first.

    Args:
        path: A checkpoint, a folder of them, or the folder of a run.
        verify: Also read every file and check its checksum.

    Raises:
        UserError: There are none.
    """
    if (path / MANIFEST).is_file():
        return [_inspect(path, verify)]
    return [_inspect(folder, verify) for folder in _folders(find_root(path))]


def find_root(path: AnyPath) -> AnyPath:
    """The folder of checkpoints at a path: itself, or that of a run."""
    for root in (path, path / "checkpoints"):
        if _folders(root):
            return root
    fix = "Give a folder of checkpoints, or the folder of a run"
    raise UserError(Problem("checkpoint-missing", "holds no checkpoint", path=str(path), fix=fix))


def prune(root: AnyPath, retention: Retention, sweep: bool) -> PruneResult:
    """Remove the intact checkpoints that the retention does not keep.

    Intact ones verify, checksums included. Damaged ones are neither counted nor removed.

    Args:
        root: The folder of checkpoints.
        retention: What to keep besides the best one.
        sweep: Also remove drafts; only if no run is writing there.

    Raises:
        UserError: None verifies, then none is removed; or one cannot be removed.
    """
    found = list_stored(root, verify=True)
    intact = [stored for stored in found if stored.complete]
    broken = tuple(stored for stored in found if not stored.complete)
    if not intact:
        rule = f"holds no intact checkpoint: {broken[-1].path.name} {broken[-1].reason}"
        raise UserError(Problem("checkpoint-none-good", rule, path=str(root)))
    numbers = [parse_name(stored.path.name) or (stored.step, 0) for stored in intact]
    best = next((number for number, stored in zip(numbers, intact, strict=True) if stored.best), None)
    gone = retention.choose_removed(numbers, numbers[-1], best)
    removed = tuple(stored for number, stored in zip(numbers, intact, strict=True) if number in gone)
    kept = tuple(stored for stored in intact if stored not in removed)
    leftovers = tuple(list_leftovers(root)) if sweep else ()
    freed = sum(stored.bytes for stored in removed) + sum(map(tree_bytes, leftovers))
    for path in (*leftovers, *(stored.path for stored in removed)):
        try:
            remove_checkpoint(path)
        except OSError as error:
            rule = f"cannot be removed: {error.strerror or error}"
            fix = "Use an account with write permission"
            raise UserError(Problem("checkpoint-not-removed", rule, path=str(path), fix=fix)) from None
    return PruneResult(kept, removed, broken, leftovers, freed)


def _folders(root: AnyPath) -> list[AnyPath]:
    if isinstance(root, ObjectPath):  # what has no manifest is a draft
        return list_checkpoints(root)
    return sort_by_step(path for path in root.glob("step-*") if path.is_dir())


def _inspect(folder: AnyPath, verify: bool) -> StoredCheckpoint:
    best = best_checkpoint(folder.parent) == folder.name
    try:
        manifest = read_manifest(folder, verify)
    except UserError as error:
        return StoredCheckpoint(folder, _step(folder) or 0, tree_bytes(folder), error.problems[0].rule, best)
    step = _step(folder)  # None for a copy under another name
    return StoredCheckpoint(
        folder, manifest.step if step is None else step, tree_bytes(folder), "", best, manifest.eval_loss
    )


def _step(folder: AnyPath) -> int | None:
    named = parse_name(folder.name)
    return named[0] if named else None
