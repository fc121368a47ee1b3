"""Input splits: the files of a corpus in parts of about 16 MB, in order.

A large, uncompressed JSON Lines file is cut into ranges of bytes; a line belongs to the range in which it
starts. Small files share a split. All other files are one part each. The place of a document is (split, row
in the split): it sorts like (file, position), however the corpus is cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from meshwright.core.errors import UserError
from meshwright.data.files import BadDataError, file_kind
from meshwright.data.sources import STDLIB, iter_files, source_problem

SPLIT_BYTES = 16 * 1024**2
SPLIT_FILES = 2000


@dataclass(frozen=True)
class FilePart:
    """A file, or a range of its bytes."""

    name: str
    path: Path
    size: int
    """Bytes of the part."""
    file_size: int = 0
    """Bytes of the whole file."""
    modified_ns: int | None = None
    """When it was changed; None for what could not be examined."""
    part: tuple[int, int] | None = None
    skip_bad: bool = True
    unreadable: str | None = None
    """Why the folder of this name cannot be listed."""


@dataclass(frozen=True)
class InputSplit:
    """Parts of files that one task reads."""

    number: int
    parts: tuple[FilePart, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)


def plan_splits(
    sources: Sequence[str],
    base: Path,
    exclude: Sequence[Path],
    skip_bad: bool = True,
    split_bytes: int = SPLIT_BYTES,
    cut_text: bool = False,
) -> list[InputSplit]:
    """Cut a corpus into splits.

    Args:
        sources: Builtin names, files, folders or globs.
        base: Folder of relative sources.
        exclude: Folders to leave out.
        skip_bad: Whether bad files and records are left out.
        split_bytes: Size of a split, about.
        cut_text: Whether plain text files may be cut too; a word count has no documents.

    Raises:
        UserError: Sources are missing or unreadable; all of them are reported.
    """
    problems = [problem for source in sources if (problem := source_problem(source, base))]
    if problems:
        raise UserError(*problems)
    skipped = frozenset(os.path.realpath(folder) for folder in exclude)
    splits: list[InputSplit] = []
    pending: list[FilePart] = []
    size = 0
    for source in sources:
        for part in _list_parts(source, base, skipped, skip_bad or source == STDLIB):
            for piece in _cut(part, split_bytes, cut_text):
                if pending and (size + piece.size > split_bytes or len(pending) >= SPLIT_FILES):
                    splits.append(InputSplit(len(splits), tuple(pending)))
                    pending, size = [], 0
                pending.append(piece)
                size += piece.size
    if pending:
        splits.append(InputSplit(len(splits), tuple(pending)))
    return splits


def _list_parts(source: str, base: Path, skipped: frozenset[str], skip_bad: bool) -> Iterator[FilePart]:
    unlisted: list[FilePart] = []

    def report(name: str, reason: str) -> None:
        unlisted.append(FilePart(name, Path(), 0, skip_bad=skip_bad, unreadable=reason))

    for name, path in iter_files(source, base, skipped, report):
        yield from unlisted
        unlisted.clear()
        try:
            facts = path.stat()
        except OSError:
            yield FilePart(name, path, 0, skip_bad=skip_bad)
        else:
            size = facts.st_size
            yield FilePart(name, path, size, size, facts.st_mtime_ns, skip_bad=skip_bad)
    yield from unlisted


def _cut(file: FilePart, split_bytes: int, cut_text: bool) -> Iterator[FilePart]:
    if file.size <= split_bytes or not _can_cut(file.path, cut_text):
        yield file
        return
    count = -(-file.size // split_bytes)
    bounds = [file.size * number // count for number in range(count + 1)]
    for begin, end in pairwise(bounds):
        yield replace(file, size=end - begin, part=(begin, end))


def _can_cut(path: Path, cut_text: bool) -> bool:
    try:
        kind = file_kind(path)
    except BadDataError:
        return False
    return kind.compression is None and (kind.kind == "jsonl" or (cut_text and kind.kind == "text"))
