"""Which documents a corpus holds.

A ``.jsonl`` file holds one document a line; any other file is one document. What cannot be read as UTF-8 text
is *quarantined*: skipped, counted and named, because one bad file among a million must not stop the work, nor
go unseen. Exact duplicates and empty documents are dropped and counted. Which files are read, and in which
order, is the business of ``sources``.

One document is in memory at a time, and 16 bytes for each document seen (to know duplicates).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.prepare.sources import iter_files, printable, source_problem

NAMED_AT_MOST = 1000
"""Quarantined names that are kept; the count goes on."""


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    """Where it came from; for people, it does not enter the prepared data."""
    text: str


@dataclass
class CorpusTally:
    """What was met while reading; shared by all sources of one corpus.

    ``documents_in = documents_out + duplicates + empty + quarantined``.
    """

    documents_in: int = 0
    documents_out: int = 0
    duplicates: int = 0
    """Documents whose text had been seen."""
    empty: int = 0
    """Documents without a single character."""
    quarantined: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents that were kept."""
    quarantined_names: list[str] = field(default_factory=list)
    """``name: reason``, the first ``NAMED_AT_MOST``."""
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def admit(self, document: Document) -> bool:
        """Count a document; False for one that is dropped."""
        self.documents_in += 1
        if not document.text:
            self.empty += 1
            return False
        utf8 = document.text.encode("utf-8")
        digest = hashlib.blake2b(utf8, digest_size=16).digest()
        if digest in self._seen:
            self.duplicates += 1
            return False
        self._seen.add(digest)
        self.documents_out += 1
        self.text_bytes += len(utf8)
        return True

    def quarantine(self, name: str, reason: str) -> None:
        """Count and name something that cannot be read."""
        self.documents_in += 1
        self.quarantined += 1
        if len(self.quarantined_names) < NAMED_AT_MOST:
            self.quarantined_names.append(f"{printable(name)}: {reason}")


def iter_documents(
    source: str,
    base: Path,
    *,
    text_field: str = "text",
    exclude: Sequence[Path] = (),
    tally: CorpusTally | None = None,
) -> Iterator[Document]:
    """The documents of one source; see :func:`iter_corpus`."""
    return iter_corpus((source,), base, text_field=text_field, exclude=exclude, tally=tally)


def iter_corpus(
    sources: Sequence[str],
    base: Path,
    *,
    text_field: str = "text",
    exclude: Sequence[Path] = (),
    tally: CorpusTally | None = None,
) -> Iterator[Document]:
    """The documents of several sources, in the order given; duplicates are dropped across all of them.

    Args:
        sources: Builtin names, files, folders or globs.
        base: Folder that relative sources start from.
        text_field: The field of a ``.jsonl`` line that holds the text.
        exclude: Folders to leave out, such as the one that is being written.
        tally: Where to count; a new one if left out.

    Returns:
        An iterator. It raises ``data-corpus-empty`` at its end if it gave no document.

    Raises:
        UserError: Sources are missing or unreadable; all of them are named, before anything is read.
    """
    problems = [problem for source in sources if (problem := source_problem(source, base))]
    if problems:
        raise UserError(*problems)
    skipped = frozenset(os.path.realpath(folder) for folder in exclude)
    return _read_all(sources, base, text_field, skipped, tally or CorpusTally())


def _read_all(
    sources: Sequence[str], base: Path, text_field: str, skipped: frozenset[str], tally: CorpusTally
) -> Iterator[Document]:
    for source in sources:
        for name, path in iter_files(source, base, skipped, tally.quarantine):
            for document in _read_file(name, path, text_field, tally):
                if tally.admit(document):
                    yield document
    if tally.documents_out == 0:
        raise UserError(_empty_problem(sources, tally))


def _empty_problem(sources: Iterable[str], tally: CorpusTally) -> Problem:
    counts = f"{tally.empty} empty documents and {tally.quarantined} that could not be read as UTF-8 text"
    example = f", such as {tally.quarantined_names[0]}" if tally.quarantined_names else ""
    return Problem(
        code="data-corpus-empty",
        path=", ".join(map(printable, sources)),
        rule=f"gives no text: {counts}{example}",
        fix="Name files that hold UTF-8 text, or .jsonl files with a text in the field that text_field names",
    )


def _read_file(name: str, path: Path, text_field: str, tally: CorpusTally) -> Iterator[Document]:
    try:
        if not path.is_file():  # a pipe would block for ever
            tally.quarantine(name, "not a regular file" if path.exists() else "a link to nothing")
        elif path.suffix.lower() == ".jsonl":
            yield from _read_lines(name, path, text_field, tally)
        else:
            yield Document(name, _decode(path.read_bytes()))
    except OSError as error:
        tally.quarantine(name, error.strerror or str(error))
    except ValueError as error:
        tally.quarantine(name, str(error))


def _read_lines(name: str, path: Path, text_field: str, tally: CorpusTally) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = _line_text(line, text_field)
            except ValueError as error:
                tally.quarantine(f"{name}:{number}", str(error))
            else:
                yield Document(f"{name}:{number}", text)


def _decode(data: bytes) -> str:
    if b"\0" in data:
        raise ValueError("binary: it holds zero bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error


def _line_text(line: bytes, text_field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise ValueError(f"no text in the field {text_field!r}")
    text: str = record[text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError("its text is not valid Unicode") from error
    return text
