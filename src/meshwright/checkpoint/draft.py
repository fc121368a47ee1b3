"""Two-phase commit of a checkpoint: all ranks write into a draft folder, rank 0 commits it.

1. Rank 0 writes ``proposal.json``: the manifest without its files, and the number of ranks.
2. Every rank writes its files, flushes them, and then writes its **vote**, with their sizes and checksums. A
   rank that cannot write votes against, with the reason.
3. When all ranks have voted for it, the coordinator writes ``manifest.json`` and renames the draft. A rename
   is atomic: the checkpoint is there as a whole, or not at all. After a vote against, it removes the draft.

An object store has no rename. There a draft has its final name from the start, with a revision that no other
attempt uses, and the manifest is the commit: it is created by a conditional put.

All of it is in the folder. So a coordinator that dies is replaced by any later process: :func:`finish_drafts`
commits a draft in which all ranks have voted, and removes any other.

No file is ever replaced. A step that is saved again becomes another revision of its checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint.manifest import (
    MANIFEST,
    PROPOSAL,
    FileFacts,
    Manifest,
    checkpoint_name,
    decode_checked,
    encode_checked,
    find_wrong_file,
    parse_manifest,
    parse_name,
)
from meshwright.core.events import Commit
from meshwright.core.files import replace_bytes, sync_path
from meshwright.core.object_path import AnyPath, ObjectPath, remove_tree, tree_bytes, write_whole

VOTE_SUFFIX = ".vote"
REFUSED_SUFFIX = ".refused"
"""Of an empty file: a vote against by a rank that cannot write any content. Its name has the error number."""
STALLED_S = 60.0
"""The coordinator gives up when no file of the draft has grown for so long."""
UPLOAD_S = 3600.0
"""The same in an object store, which does not show an upload before it is complete."""
POLL_S = (0.002, 0.1)
"""First and longest interval between two looks at the votes."""
_REFUSED_NAME = re.compile(rf"rank-(\d{{5,}})\.(\d{{1,4}}){re.escape(REFUSED_SUFFIX)}")
OBJECT_POLL_S = (0.05, 1.0)
"""The same in an object store: each look is a request."""
GENERATIONS = 10_000
"""In an object store the revision of a draft is its attempt times this number plus its generation."""
_DRAFT_NAME = re.compile(r"\.step-(\d{8,})\.(\d+)\.part")


class DraftError(OSError):
    """A checkpoint that cannot be committed; the run goes on without it."""


@dataclass(frozen=True)
class Vote:
    """What one rank says of its part of a draft."""

    rank: int
    files: dict[str, FileFacts]
    refused: str = ""
    """Why it could not write them; empty for a vote in favour."""


_VOTE: TypeAdapter[Vote] = TypeAdapter(Vote)


class Draft:
    """A checkpoint that is being written: a hidden folder next to the finished ones."""

    def __init__(self, root: AnyPath, step: int, generation: int, attempt: int = 0) -> None:
        """Name the draft; nothing is written.

        Args:
            root: Folder of the checkpoints.
            step: Steps done.
            generation: Of the run; every generation has its own drafts.
            attempt: When the attempt of the run began, in milliseconds; in an object store no other attempt
                may have the same.
        """
        self.root, self.step, self.generation, self.attempt = root, step, generation, attempt
        self.folder: AnyPath
        if isinstance(root, ObjectPath):
            self.folder = root / checkpoint_name(step, attempt * GENERATIONS + generation)
        else:
            self.folder = root / f".{checkpoint_name(step)}.{generation}.part"
        self._votes: dict[str, Vote] = {}

    @classmethod
    def parse(cls, folder: AnyPath) -> Draft | None:
        """The draft of a folder; None if its name is not that of a draft."""
        if isinstance(folder, ObjectPath):
            if (named := parse_name(folder.name)) is None:
                return None
            attempt, generation = divmod(named[1], GENERATIONS)
            return cls(folder.parent, named[0], generation, attempt)
        found = _DRAFT_NAME.fullmatch(folder.name)
        return cls(folder.parent, int(found[1]), int(found[2])) if found else None

    def open(self) -> None:
        """Create the folder; every rank calls it."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def propose(self, manifest: Manifest) -> None:
        """Write the manifest that is completed by the votes."""
        write_whole(self.folder / PROPOSAL, encode_checked(asdict(manifest)))

    def write_small_file(self, name: str, content: bytes) -> FileFacts:
        """Write a file that is not made of tensors."""
        write_whole(self.folder / name, content)
        return FileFacts(len(content), hashlib.sha256(content).hexdigest())

    def vote(self, rank: int, files: Mapping[str, FileFacts]) -> None:
        """Vote for the checkpoint; the files are flushed already."""
        self._write_vote(Vote(rank, dict(files)))

    def refuse(self, rank: int, reason: str, files: Iterable[str] = ()) -> None:
        """Vote against it. First removes the files of this rank, which gives room on a full disk."""
        for name in files:
            (self.folder / name).unlink(missing_ok=True)
        try:
            self._write_vote(Vote(rank, {}, reason))
        except OSError as error:  # no room for a file with content, but perhaps for a name
            (self.folder / f"rank-{rank:05d}.{error.errno or 0}{REFUSED_SUFFIX}").touch()

    def read_votes(self) -> dict[int, Vote]:
        """The votes so far, by rank; one with another checksum does not count.

        Raises:
            OSError: They cannot be read now.
        """
        found = sorted(path.name for path in self.folder.glob("*"))
        names = (_REFUSED_NAME.fullmatch(name) for name in found)
        refused = [(int(name[1]), os.strerror(int(name[2]))) for name in names if name]
        votes = {rank: Vote(rank, {}, f"it cannot write any file: {reason}") for rank, reason in refused}
        for name in found:
            if name.endswith(VOTE_SUFFIX) and name not in self._votes:
                with suppress(FileNotFoundError, ValueError, ValidationError, RecursionError):
                    content = (self.folder / name).read_bytes()
                    self._votes[name] = _VOTE.validate_python(decode_checked(content))
        return votes | {vote.rank: vote for vote in self._votes.values()}

    def wait_for_votes(self, ranks: Collection[int], wait: Callable[[float], bool]) -> dict[int, Vote]:
        """Wait until all ranks have voted, for it or against it. Then none of them writes any more.

        Args:
            ranks: Whose votes are needed.
            wait: Waits for some seconds; returns True to give up.

        Raises:
            DraftError: Nothing was written for a long time, or ``wait`` gave up.
        """
        is_object = isinstance(self.folder, ObjectPath)
        stalled_s, poll_s = (UPLOAD_S, OBJECT_POLL_S) if is_object else (STALLED_S, POLL_S)
        missing, size, grown_at, pause = sorted(ranks), -1, time.monotonic(), poll_s[0]
        while True:
            with suppress(OSError):  # a store that does not answer now may answer later
                votes = self.read_votes()
                if not (missing := sorted(set(ranks) - set(votes))):
                    return votes
                if (now_bytes := tree_bytes(self.folder)) != size:
                    size, grown_at = now_bytes, time.monotonic()
            if time.monotonic() > grown_at + stalled_s:
                raise DraftError(f"no vote of ranks {missing}, and nothing written for {stalled_s:.0f} s")
            if wait(pause):
                raise DraftError("the generation ended before all ranks had voted")
            pause = min(2 * pause, poll_s[1])

    def commit(self, manifest: Manifest, guard: Commit = nullcontext) -> AnyPath:
        """Write the manifest and give the draft its name.

        Args:
            manifest: With all files, which are written and flushed.
            guard: Entered around the commit; raises where this process must commit no more.
        """
        content = encode_checked(asdict(manifest))
        if isinstance(self.folder, ObjectPath):
            return self._put_manifest(self.folder, content, guard)
        assert isinstance(self.root, Path), "as its folder"
        return self._rename(self.root, self.folder, content, guard)

    def _put_manifest(self, folder: ObjectPath, content: bytes, guard: Commit) -> ObjectPath:
        """Commit by a conditional put: a coordinator and its successor cannot both do it."""
        with guard():
            try:
                (folder / MANIFEST).create(content)
            except FileExistsError:
                if (folder / MANIFEST).read_bytes() != content:  # else a request that was sent twice
                    raise
        with suppress(OSError):  # it is committed; readers ignore what stays
            for path in folder.glob("*"):
                if path.name == PROPOSAL or path.name.endswith(VOTE_SUFFIX):
                    path.unlink(missing_ok=True)
        return folder

    def _rename(self, root: Path, folder: Path, content: bytes, guard: Commit) -> Path:
        """Commit by a rename; a step that was saved before gets a new revision."""
        replace_bytes(folder / MANIFEST, content)
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

    def finish(self, guard: Commit = nullcontext) -> AnyPath | None:
        """Commit the draft of a coordinator that died, if all ranks had voted for it; else remove it.

        A draft that cannot be read or written now is left as it is.

        Returns:
            The checkpoint; None if there is none.
        """
        try:
            if self.folder.is_symlink():
                raise ValueError("a link is not followed")
            if (self.folder / MANIFEST).exists():
                manifest = parse_manifest((self.folder / MANIFEST).read_bytes())
            else:
                manifest, votes = parse_manifest((self.folder / PROPOSAL).read_bytes()), self.read_votes()
                if len(votes) < manifest.world_size or any(vote.refused for vote in votes.values()):
                    raise ValueError("not all ranks have voted for it")
                manifest = add_files(manifest, votes)
            if find_wrong_file(self.folder, manifest) is None:
                return self.commit(manifest, guard)
        except (FileNotFoundError, ValueError, RecursionError):
            pass  # not complete
        except OSError:
            return None
        self.discard()
        return None

    def discard(self) -> None:
        """Remove the draft; what has a manifest in an object store is a checkpoint, and stays."""
        with suppress(OSError):
            if not (isinstance(self.folder, ObjectPath) and (self.folder / MANIFEST).is_file()):
                remove_tree(self.folder)

    def _write_vote(self, vote: Vote) -> None:
        write_whole(self.folder / f"rank-{vote.rank:05d}{VOTE_SUFFIX}", encode_checked(asdict(vote)))


def add_files(manifest: Manifest, votes: Mapping[int, Vote]) -> Manifest:
    """The manifest with the files that all ranks have written."""
    files = {name: facts for _, vote in sorted(votes.items()) for name, facts in vote.files.items()}
    return replace(manifest, files=files)


def list_drafts(root: AnyPath) -> list[Draft]:
    """The drafts next to the finished checkpoints; in an object store, what has no manifest."""
    if isinstance(root, ObjectPath):
        paths = list(root.list_sizes())
        names = {path.split("/")[0] for path in paths if "/" in path}
        folders: list[AnyPath] = [root / name for name in sorted(names) if f"{name}/{MANIFEST}" not in paths]
    else:
        folders = sorted(root.glob(".step-*.part"))
    return [draft for folder in folders if (draft := Draft.parse(folder)) is not None]


def finish_drafts(root: AnyPath, guard: Commit = nullcontext) -> list[AnyPath]:
    """Commit or remove the drafts that earlier processes left. Only with the folder's lock.

    Returns:
        The checkpoints that were committed.
    """
    finished = [draft.finish(guard) for draft in list_drafts(root)]
    return [path for path in finished if path is not None]


def remove_older_drafts(newest: Draft) -> None:
    """Remove what failed saves of the same generation left; the ranks may be writing the next one already."""
    for draft in list_drafts(newest.root):
        same = (draft.attempt, draft.generation) == (newest.attempt, newest.generation)
        if same and draft.step < newest.step:
            draft.discard()
