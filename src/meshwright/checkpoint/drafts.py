"""Drafts in a folder and in an object store: their names, and how each becomes a checkpoint.

A folder draft is hidden, and a rename commits it. An object store has no rename. There a draft has its final
name from the start, with a revision that no other attempt uses. Its manifest is the commit, created by a
conditional put.

No file is ever replaced. A step that is saved again becomes another revision of its checkpoint.
"""

from __future__ import annotations

import re
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from meshwright.checkpoint.draft import VOTE_SUFFIX, Draft
from meshwright.checkpoint.manifest import (
    MANIFEST,
    PROPOSAL,
    Manifest,
    checkpoint_name,
    encode_checked,
    parse_name,
)
from meshwright.core.events import Commit
from meshwright.core.files import replace_bytes, sync_path
from meshwright.core.object_path import AnyPath, ObjectPath

GENERATIONS = 10_000
"""In an object store the revision of a draft is its attempt times this number plus its generation."""
_DRAFT_NAME = re.compile(r"\.step-(\d{8,})\.(\d+)\.part")


class FolderDraft(Draft):
    """A hidden folder next to the finished checkpoints."""

    stalled_s = 60.0
    poll_s = (0.002, 0.1)
    folder: Path

    @classmethod
    def at(cls, root: Path, step: int, generation: int) -> FolderDraft:
        """The draft of a step. Its name has no attempt: a generation belongs to one attempt."""
        return cls(root / f".{checkpoint_name(step)}.{generation}.part", step, generation, 0)

    @classmethod
    def list_in(cls, root: Path) -> list[FolderDraft]:
        """The drafts in a folder of checkpoints."""
        found = [(path, _DRAFT_NAME.fullmatch(path.name)) for path in sorted(root.glob(".step-*.part"))]
        return [cls(path, int(name[1]), int(name[2]), 0) for path, name in found if name]

    def commit(self, manifest: Manifest, guard: Commit = nullcontext) -> Path:
        """Commit by a rename; a step that was saved before gets a new revision."""
        folder, root = self.folder, self.folder.parent
        replace_bytes(folder / MANIFEST, encode_checked(asdict(manifest)))
        for path in (*folder.glob(f"*{VOTE_SUFFIX}"), folder / PROPOSAL):
            path.unlink(missing_ok=True)
        sync_path(folder)
        named = [parse_name(path.name) for path in root.glob(f"{checkpoint_name(self.step)}*")]
        # After the last one: the number of an older revision may be free again, and counts as older.
        revision = max((1 + number for step, number in filter(None, named) if step == self.step), default=0)
        final = root / checkpoint_name(self.step, revision)
        with guard():
            folder.rename(final)
            sync_path(root)
        return final


class ObjectDraft(Draft):
    """Objects below the name of the checkpoint, without its manifest."""

    stalled_s = 3600.0  # an object store does not show an upload before it is complete
    poll_s = (0.05, 1.0)  # each look is a request
    folder: ObjectPath

    @classmethod
    def at(cls, root: ObjectPath, step: int, generation: int, attempt: int) -> ObjectDraft:
        """The draft of a step; no other attempt may have the same number."""
        folder = root / checkpoint_name(step, attempt * GENERATIONS + generation)
        return cls(folder, step, generation, attempt)

    @classmethod
    def list_in(cls, root: ObjectPath) -> list[ObjectDraft]:
        """The drafts below a prefix: the names of checkpoints without a manifest."""
        paths = set(root.list_sizes())
        names = {path.split("/")[0] for path in paths if "/" in path}
        found = [(name, parse_name(name)) for name in sorted(names) if f"{name}/{MANIFEST}" not in paths]
        return [
            cls(root / name, number[0], number[1] % GENERATIONS, number[1] // GENERATIONS)
            for name, number in found
            if number is not None
        ]

    def commit(self, manifest: Manifest, guard: Commit = nullcontext) -> ObjectPath:
        """Commit by a conditional put: a coordinator and its successor cannot both do it."""
        folder, content = self.folder, encode_checked(asdict(manifest))
        with guard():
            try:
                (folder / MANIFEST).create(content)
            except FileExistsError:
                if (folder / MANIFEST).read_bytes() != content:  # else a request that was sent twice
                    raise
        with suppress(OSError):  # it is committed; readers ignore the files that stay
            for path in folder.glob("*"):
                if path.name == PROPOSAL or path.name.endswith(VOTE_SUFFIX):
                    path.unlink(missing_ok=True)
        return folder

    def discard(self) -> None:
        """Remove the draft, unless it has a manifest: then it is a checkpoint."""
        with suppress(OSError):
            if not (self.folder / MANIFEST).is_file():
                super().discard()


def new_draft(root: AnyPath, step: int, generation: int, attempt: int = 0) -> Draft:
    """Name the draft of a step; nothing is written.

    Args:
        root: Folder or prefix of the checkpoints.
        step: Steps done.
        generation: Generation of the run; every generation has its own drafts.
        attempt: When the attempt of the run began, in milliseconds.
    """
    if isinstance(root, ObjectPath):
        return ObjectDraft.at(root, step, generation, attempt)
    return FolderDraft.at(root, step, generation)


def list_drafts(root: AnyPath) -> list[Draft]:
    """The drafts next to the finished checkpoints."""
    return [*(ObjectDraft.list_in(root) if isinstance(root, ObjectPath) else FolderDraft.list_in(root))]


def list_leftovers(root: AnyPath) -> list[AnyPath]:
    """Leftovers of killed processes: drafts, and in a folder also checkpoints that were being removed."""
    if isinstance(root, ObjectPath):
        return [draft.folder for draft in ObjectDraft.list_in(root)]
    return [*root.glob(".step-*.part"), *root.glob(".step-*.old")]


def finish_drafts(root: AnyPath, guard: Commit = nullcontext) -> list[AnyPath]:
    """Commit or remove the drafts that earlier processes left. Only with the folder's lock.

    Returns:
        The checkpoints that were committed.
    """
    finished = [draft.finish(guard) for draft in list_drafts(root)]
    return [path for path in finished if path is not None]


def remove_older_drafts(newest: Draft) -> None:
    """Remove the drafts of failed saves of this generation; the ranks may be writing the next one already."""
    for draft in list_drafts(newest.root):
        same = (draft.attempt, draft.generation) == (newest.attempt, newest.generation)
        if same and draft.step < newest.step:
            draft.discard()
