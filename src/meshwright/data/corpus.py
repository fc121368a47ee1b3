"""The documents of a corpus.

A ``.jsonl`` file has one document per line; any other file is one document. With a template every document
is a line with a conversation. Unreadable documents are *quarantined*: skipped, counted and reported, because
one bad file among a million must not stop the preparation. Exact duplicates and empty documents are dropped
and counted. ``sources`` lists the files.

Memory: one document, and 16 bytes per document for the detection of duplicates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import Span, Template, holds_conversation, read_conversation
from meshwright.data.sources import iter_files, printable, source_problem

MAX_NAMED = 1000
"""Quarantined names that are kept; the others are only counted."""


@dataclass(frozen=True)
class Document:
    """One document."""

    name: str
    """File and line; not part of the prepared data."""
    text: str
    parts: tuple[Span, ...] = ()
    """The spans of a conversation; empty for plain text."""


@dataclass(frozen=True)
class ReadOptions:
    """How lines of ``.jsonl`` files are read."""

    text_field: str = "text"
    """Field with the text, without a template."""
    template: Template | None = None
    """Renders conversations; lines without one are quarantined."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    special_tokens: tuple[str, ...] = ()
    """Tokens that the text of a message must not turn into."""


@dataclass
class CorpusStats:
    """Counts of the documents of a corpus.

    ``documents_in = documents_out + duplicates + empty + quarantined``.
    """

    documents_in: int = 0
    documents_out: int = 0
    duplicates: int = 0
    """Documents with a text that was read before."""
    empty: int = 0
    """Empty documents."""
    quarantined: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents that were kept."""
    quarantined_names: list[str] = field(default_factory=list)
    """``name: reason``, the first ``MAX_NAMED``."""
    _seen: set[bytes] = field(default_factory=set, repr=False)

    def admit(self, document: Document) -> bool:
        """Count a document; False if it is dropped."""
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
        """Count and report something that cannot be read."""
        self.documents_in += 1
        self.quarantined += 1
        if len(self.quarantined_names) < MAX_NAMED:
            self.quarantined_names.append(f"{printable(name)}: {reason}")


def iter_corpus(
    sources: Sequence[str],
    base: Path,
    *,
    options: ReadOptions | None = None,
    exclude: Sequence[Path] = (),
    tally: CorpusStats | None = None,
) -> Iterator[Document]:
    """The documents of several sources, in order, without duplicates.

    Args:
        sources: Builtin names, files, folders or globs.
        base: Folder of relative sources.
        options: How lines of ``.jsonl`` files are read; as text in the field ``text`` if left out.
        exclude: Folders to leave out, such as the one that is being written.
        tally: Where to count; a new one if left out.

    Returns:
        An iterator. It raises ``data-corpus-empty`` at the end if there was no document.

    Raises:
        UserError: Sources are missing or unreadable; all of them are reported before reading.
    """
    problems = [problem for source in sources if (problem := source_problem(source, base))]
    if problems:
        raise UserError(*problems)
    skipped = frozenset(os.path.realpath(folder) for folder in exclude)
    return _read_all(sources, base, options or ReadOptions(), skipped, tally or CorpusStats())


def _read_all(
    sources: Sequence[str], base: Path, options: ReadOptions, skipped: frozenset[str], tally: CorpusStats
) -> Iterator[Document]:
    for source in sources:
        for name, path in iter_files(source, base, skipped, tally.quarantine):
            for document in _read_file(name, path, options, tally):
                if tally.admit(document):
                    yield document
    if tally.documents_out == 0:
        raise UserError(_empty_problem(sources, options, tally))


def _empty_problem(sources: Iterable[str], options: ReadOptions, tally: CorpusStats) -> Problem:
    wanted = "UTF-8 text" if options.template is None else "conversations"
    counts = f"{tally.empty} empty documents and {tally.quarantined} that could not be read as {wanted}"
    example = f", such as {tally.quarantined_names[0]}" if tally.quarantined_names else ""
    fix = "Use files with UTF-8 text, or .jsonl files with text in the field that text_field names"
    if options.template is not None:
        fields = f"{options.prompt_field} and {options.answer_field}"
        fix = f"Use .jsonl files whose lines have messages, or {fields}; or leave the template out"
    return Problem(
        code="data-corpus-empty",
        path=", ".join(map(printable, sources)),
        rule=f"has no text: {counts}{example}",
        fix=fix,
    )


def _read_file(name: str, path: Path, options: ReadOptions, tally: CorpusStats) -> Iterator[Document]:
    try:
        if not path.is_file():  # reading a pipe would block
            tally.quarantine(name, "not a regular file" if path.exists() else "a broken link")
        elif path.suffix.lower() == ".jsonl":
            yield from _read_lines(name, path, options, tally)
        elif options.template is not None:
            tally.quarantine(name, "not a .jsonl file, and a template needs lines with conversations")
        else:
            yield Document(name, _decode(path.read_bytes()))
    except OSError as error:
        tally.quarantine(name, error.strerror or str(error))
    except ValueError as error:
        tally.quarantine(name, str(error))


def _read_lines(name: str, path: Path, options: ReadOptions, tally: CorpusStats) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                document = _line_document(f"{name}:{number}", line, options)
            except ValueError as error:
                tally.quarantine(f"{name}:{number}", str(error))
            else:
                yield document


def _decode(data: bytes) -> str:
    if b"\0" in data:
        raise ValueError("binary: it has zero bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error


def _line_document(name: str, line: bytes, options: ReadOptions) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not a JSON object") from error
    if options.template is None:
        return Document(name, _line_text(record, options.text_field))
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    conversation = read_conversation(record, name, options.prompt_field, options.answer_field)
    parts = options.template.render(conversation, options.special_tokens)
    return Document(name, "".join(part.text for part in parts), parts)


def _line_text(record: Any, text_field: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        instruction = isinstance(record, dict) and holds_conversation(record)
        hint = "; it has a conversation, which needs a template" if instruction else ""
        raise ValueError(f"no text in the field {text_field!r}{hint}")
    text: str = record[text_field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError("its text is not valid Unicode") from error
    return text
