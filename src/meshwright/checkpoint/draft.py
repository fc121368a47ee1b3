"""Two-phase commit of a checkpoint: all ranks write into a draft folder, rank 0 commits it.

1. Rank 0 writes ``proposal.json``: the manifest without its files, and the number of ranks.
2. Every rank writes its files, flushes them, and then writes its **vote**, with their sizes and checksums. A
   rank that cannot write votes against, with the reason.
3. When all ranks have voted for it, the coordinator commits it. The commit is atomic, in a folder and in an
   object store (``drafts``). After a vote against, the coordinator removes the draft.

All files are in the draft. So any later process can replace a coordinator that dies: it commits a draft in
which all ranks have voted, and removes any other (:meth:`Draft.finish`).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter, ValidationError

from meshwright.checkpoint.manifest import (
    MANIFEST,
    PROPOSAL,
    FileFacts,
    Manifest,
    decode_checked,
    encode_checked,
    find_wrong_file,
    parse_manifest,
)
from meshwright.core.events import Commit
from meshwright.core.object_path import AnyPath, remove_tree, tree_bytes, write_whole

VOTE_SUFFIX = ".vote"
REFUSED_SUFFIX = ".refused"
"""Suffix of an empty file: a vote against by a rank that cannot write any content. Its name has the error
number."""
_REFUSED_NAME = re.compile(rf"rank-(\d{{5,}})\.(\d{{1,4}}){re.escape(REFUSED_SUFFIX)}")


class DraftError(OSError):
    """A checkpoint that cannot be committed; the run goes on without it."""


@dataclass(frozen=True)
class Vote:
    """The files that one rank has written into a draft, or the reason why it could not."""

    rank: int
    files: dict[str, FileFacts]
    refused: str = ""
    """The reason; empty for a vote in favour."""


_VOTE: TypeAdapter[Vote] = TypeAdapter(Vote)


class Draft(ABC):
    """A checkpoint that is being written."""

    stalled_s: float
    """The coordinator gives up when no file of the draft has grown for so long."""
    poll_s: tuple[float, float]
    """First and longest interval between two looks at the votes."""

    def __init__(self, folder: AnyPath, step: int, generation: int, attempt: int) -> None:
        """Name the draft; nothing is written.

        Args:
            folder: Folder of its files.
            step: Steps done.
            generation: Generation of the run; every generation has its own drafts.
            attempt: When the attempt of the run began, in milliseconds.
        """
        self.folder, self.step, self.generation, self.attempt = folder, step, generation, attempt
        self._votes: dict[str, Vote] = {}

    @property
    def root(self) -> AnyPath:
        """Folder of the checkpoints."""
        return self.folder.parent

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
        missing, size, grown_at, pause = sorted(ranks), -1, time.monotonic(), self.poll_s[0]
        while True:
            with suppress(OSError):  # a store that does not answer now may answer later
                votes = self.read_votes()
                if not (missing := sorted(set(ranks) - set(votes))):
                    return votes
                if (now_bytes := tree_bytes(self.folder)) != size:
                    size, grown_at = now_bytes, time.monotonic()
            if time.monotonic() > grown_at + self.stalled_s:
                raise DraftError(
                    f"no vote of ranks {missing}, and nothing written for {self.stalled_s:.0f} s"
                )
            if wait(pause):
                raise DraftError("the generation ended before all ranks had voted")
            pause = min(2 * pause, self.poll_s[1])

    @abstractmethod
    def commit(self, manifest: Manifest, guard: Commit = nullcontext) -> AnyPath:
        """Write the manifest and make the draft a checkpoint.

        Args:
            manifest: With all files, which are written and flushed.
            guard: Entered around the commit; raises where this process must commit no more.
        """

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
        """Remove the draft."""
        with suppress(OSError):
            remove_tree(self.folder)

    def _write_vote(self, vote: Vote) -> None:
        write_whole(self.folder / f"rank-{vote.rank:05d}{VOTE_SUFFIX}", encode_checked(asdict(vote)))


def add_files(manifest: Manifest, votes: Mapping[int, Vote]) -> Manifest:
    """The manifest with the files that all ranks have written."""
    files = {name: facts for _, vote in sorted(votes.items()) for name, facts in vote.files.items()}
    return replace(manifest, files=files)
