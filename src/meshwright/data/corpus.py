"""The documents of a corpus.

A text file is one document. A record of any other file is one: text in ``text_field``, or with a template a
conversation. Unreadable documents are *quarantined* (skipped, counted and named) or, with ``skip_bad=False``,
an error. Exact duplicates and empty documents are dropped and counted. ``sources`` lists the files.

Memory: one record, a piece of a text file, and 8 bytes per document for the detection of duplicates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural
from meshwright.data.chat import RECORD_FIELDS, Span, Template, holds_conversation, read_conversation
from meshwright.data.digests import DigestSet
from meshwright.data.files import BadDataError, FileKind, decode_chunks, file_kind, open_file
from meshwright.data.records import iter_records
from meshwright.data.sources import STDLIB, iter_files, printable, source_problem
from meshwright.data.steps.examine import StepOptions, TextFacts, examine_text
from meshwright.data.steps.filters import describe_rules
from meshwright.data.steps.normalize import normalize_text

MAX_NAMED = 1000
"""Quarantined names that are kept; the others are only counted."""
LONG_CHARACTERS = 256 * 1024
"""A text above this length is encoded, and a text file read, piece by piece."""
PIECE_CHARACTERS = 32 * 1024
"""Length of a piece, about; at most four times as much."""

_CUTS = (
    re.compile(r"(?<=\w)(?= \S)|(?<=\S\n)(?=\S)"),
    re.compile(r"(?<=[^\W\d_])(?=[^\w\s])"),  # minified code, JSON on one line
)
"""Where a long text is split, first choice first: no token of byte-level BPE (GPT-2, Llama 3) spans it."""


@dataclass(frozen=True)
class Document:
    """One document."""

    name: str
    """File and line; not part of the prepared data."""
    text: str
    parts: tuple[Span, ...] = ()
    """The spans of a conversation; empty for plain text."""
    read_pieces: Callable[[], Iterator[str]] | None = None
    """Reads a long text piece by piece; ``text`` is then empty."""
    digest: bytes = b""
    """Hash of the text, once it was examined."""

    def pieces(self) -> Iterator[str]:
        """The text; of a long one, piece by piece."""
        if self.read_pieces is not None:
            return self.read_pieces()
        return split_text((self.text,)) if len(self.text) > LONG_CHARACTERS else iter((self.text,))


@dataclass(frozen=True)
class ReadOptions:
    """How files are read."""

    text_field: str = "text"
    """Field with the text, without a template."""
    template: Template | None = None
    """Renders conversations; records without one are bad."""
    prompt_field: str | None = None
    answer_field: str | None = None
    special_tokens: tuple[str, ...] = ()
    """Tokens that the text of a message must not turn into."""
    skip_bad: bool = True
    """Whether bad files and records are left out and counted; otherwise the first one is an error."""
    steps: StepOptions = field(default_factory=StepOptions)
    """Normalisation, filters and the removal of near-duplicates."""


@dataclass
class CorpusStats:
    """Counts of the documents of a corpus.

    ``documents_in = documents_out + duplicates + near_duplicates + filtered + empty + quarantined``.
    """

    documents_in: int = 0
    documents_out: int = 0
    duplicates: int = 0
    """Documents with a text that was read before."""
    near_duplicates: int = 0
    """Documents that share a band with an earlier one."""
    filtered: int = 0
    """Documents that a rule of ``[filter]`` drops."""
    empty: int = 0
    """Empty documents."""
    quarantined: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents that were kept."""
    quarantined_names: list[str] = field(default_factory=list)
    """``name: reason``, the first ``MAX_NAMED``."""
    without_records: str = ""
    """The first file of records that has none, for errors."""
    total_bytes: int = 0
    """Size of all files."""
    files_done_bytes: int = 0
    """Size of the files whose documents have all been read."""
    _open_file: tuple[IO[bytes], int] | None = field(default=None, repr=False)
    _seen: DigestSet = field(default_factory=DigestSet, repr=False)
    _bands: set[int] = field(default_factory=set, repr=False)

    @property
    def read_bytes(self) -> int:
        """How much of the files has been read, as they are on disk."""
        if self._open_file is None or self._open_file[0].closed:
            return self.files_done_bytes
        file, before = self._open_file
        return before + file.tell()

    def admit(self, facts: TextFacts) -> bool:
        """Count a document; False if it is dropped."""
        self.documents_in += 1
        if facts.size == 0:
            self.empty += 1
        elif facts.dropped_by is not None:
            self.filtered += 1
        elif not self._seen.add(facts.digest):
            self.duplicates += 1
        elif self._shares_band(facts.bands.tolist()):
            self.near_duplicates += 1
        else:
            self.documents_out += 1
            self.text_bytes += facts.size
            return True
        return False

    def _shares_band(self, bands: list[int]) -> bool:
        """Whether an earlier document has a band of this one, kept or not; its bands count from now on."""
        shared = not self._bands.isdisjoint(bands)
        self._bands.update(bands)
        return shared

    def quarantine(self, name: str, reason: str) -> None:
        """Count and report something that cannot be read."""
        self.documents_in += 1
        self.quarantined += 1
        if len(self.quarantined_names) < MAX_NAMED:
            self.quarantined_names.append(f"{printable(name)}: {reason}")

    def opened(self, file: IO[bytes], before: int) -> None:
        """The file that is being read, and the size of the files before it."""
        self._open_file = file, before

    def finished(self, path: Path) -> None:
        """Everything in a file has been read."""
        self._open_file = None
        self.files_done_bytes += size_of(path)


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
        options: How files are read; records as text in the field ``text`` if left out.
        exclude: Folders to leave out, such as the one that is being written.
        tally: Where to count; a new one if left out. Several calls may share one.

    Returns:
        An iterator. It raises ``data-corpus-empty`` at the end if there was no document.

    Raises:
        UserError: Sources are missing or unreadable; all of them are reported before reading.
    """
    problems = [problem for source in sources if (problem := source_problem(source, base))]
    if problems:
        raise UserError(*problems)
    skipped = frozenset(os.path.realpath(folder) for folder in exclude)
    tally = tally or CorpusStats()
    tally.total_bytes += sum(
        size_of(path) for source in sources for _, path in iter_files(source, base, skipped, _ignore)
    )
    return _read_all(sources, base, options or ReadOptions(), skipped, tally)


def size_of(path: Path) -> int:
    """Size of a file; 0 for one that cannot be read, which is reported later."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_all(
    sources: Sequence[str], base: Path, options: ReadOptions, skipped: frozenset[str], tally: CorpusStats
) -> Iterator[Document]:
    for source in sources:
        reject = _Rejects(tally, options.skip_bad or source == STDLIB)
        for name, path in iter_files(source, base, skipped, reject.unreadable):
            for document in read_file(name, path, options, tally, reject):
                try:
                    facts = examine_text(document.pieces(), options.steps)
                except BadDataError as error:  # a long text is decoded here
                    reject(name, error)
                else:
                    if tally.admit(facts):
                        yield replace(document, digest=facts.digest)
            tally.finished(path)
    if tally.documents_out == 0:
        raise UserError(empty_problem(sources, options, tally))


class Reject(Protocol):
    """Takes a bad file or record."""

    def __call__(self, name: str, error: BadDataError) -> None:
        """Quarantine it, or raise."""


@dataclass(frozen=True)
class _Rejects:
    """Counts a bad file or record, or raises an error for it."""

    tally: CorpusStats
    skip: bool

    def __call__(self, name: str, error: BadDataError) -> None:
        if self.skip:
            self.tally.quarantine(name, str(error))
            return
        raise UserError(bad_record_problem(name, error)) from error

    def unreadable(self, name: str, reason: str) -> None:
        """A file or folder that cannot be opened."""
        self(name, unreadable_file(reason))


def bad_record_problem(name: str, error: BadDataError) -> Problem:
    """The problem of a bad file or record, if the job stops at the first one."""
    skip = "on_bad_records=skip (in a job: data.on_bad_records)"
    fix = f"{error.fix or 'Correct it'}, or leave bad files and records out with {skip}"
    return Problem(error.code, f"cannot be used: {error}", path=printable(name), fix=fix)


def unreadable_file(reason: str) -> BadDataError:
    """Why a file or folder cannot be opened."""
    return BadDataError("data-path-unreadable", reason, "Give permission to read it")


def _ignore(name: str, reason: str) -> None:
    """Files are listed twice, and reported the second time."""


def empty_problem(sources: Iterable[str], options: ReadOptions, tally: CorpusStats) -> Problem:
    """Why a corpus without documents is empty."""
    example = f", such as {tally.quarantined_names[0]}" if tally.quarantined_names else ""
    unreadable = "unreadable" if options.template is None else "that could not be read as conversations"
    rules = describe_rules(options.steps.filter)
    reasons = [
        (tally.filtered, f"the filter dropped {tally.filtered} ({rules})"),
        (tally.empty, f"{tally.empty} empty"),
        (tally.quarantined, f"{tally.quarantined} {unreadable}{example}"),
    ]
    counts = f"of {format_plural(tally.documents_in, 'document')}, "
    counts += ", ".join(text for count, text in reasons if count)
    if tally.documents_in == 0:
        counts = tally.without_records or "there are no files"
    fix = "Use files with UTF-8 text, or records with text in the field that text_field names"
    if options.template is not None:
        fix = "Use records with messages, or with prompt and answer; or leave the template out"
    if tally.filtered:
        fix = "Relax the rules of [filter], or add other documents"
    return Problem(
        code="data-corpus-empty",
        path=", ".join(map(printable, sources)),
        rule=f"has no text: {counts}",
        fix=fix,
    )


def read_file(
    name: str,
    path: Path,
    options: ReadOptions,
    tally: CorpusStats,
    reject: Reject,
    part: tuple[int, int] | None = None,
) -> Iterator[Document]:
    """The documents of one file, normalised, with duplicates.

    Args:
        name: To call it by.
        path: Where it is.
        options: How it is read.
        tally: Told which file is open.
        reject: Called for a bad file or record, before the next document.
        part: Only the lines that start in this range of bytes; of an uncompressed JSON Lines file.
    """
    try:
        if not path.is_file():  # reading a pipe would block
            reason = "not a regular file" if path.exists() else "a broken link"
            raise BadDataError("data-path-unreadable", reason)
        kind = file_kind(path)
        if kind.kind != "text":
            documents = _read_records(name, path, kind, options, tally, reject, part)
        elif options.template is not None:
            reason = "plain text, and a template needs records with conversations"
            raise BadDataError("data-not-conversation", reason, "Leave the template out")
        else:
            documents = iter((_read_text(name, path, kind, tally),))
        for document in documents:
            yield _normalized(document) if options.steps.normalize else document
    except BadDataError as error:
        reject(name, error)
    except OSError as error:
        reject(name, unreadable_file(error.strerror or str(error)))


def _normalized(document: Document) -> Document:
    read = document.read_pieces
    if read is None:
        return replace(document, text=normalize_text(document.text))
    return replace(document, read_pieces=lambda: map(normalize_text, read()))


def _read_text(name: str, path: Path, kind: FileKind, tally: CorpusStats) -> Document:
    before = tally.files_done_bytes

    def read_pieces() -> Iterator[str]:
        with open_file(path, kind.compression) as (stream, raw):
            tally.opened(raw, before)
            yield from split_text(decode_chunks(stream))

    with open_file(path, kind.compression) as (stream, raw):
        tally.opened(raw, before)
        text = ""
        for chunk in decode_chunks(stream):
            text += chunk
            if len(text) > LONG_CHARACTERS:
                return Document(name, "", read_pieces=read_pieces)
        return Document(name, text)


def split_text(chunks: Iterable[str], size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Split a text into pieces of about ``size`` characters, at places that no byte-level BPE token spans.

    A text without such a place within four times the size is split anywhere.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        begin = 0
        # A window of fixed size: the place must not depend on where a chunk ends.
        while len(text) - begin > 4 * size:
            found = (cut.search(text, begin + size, begin + 4 * size) for cut in _CUTS)
            place = next(filter(None, found), None)
            end = place.start() if place else begin + 4 * size
            yield text[begin:end]
            begin = end
        text = text[begin:]
    if text:
        yield text


def _read_records(
    name: str,
    path: Path,
    kind: FileKind,
    options: ReadOptions,
    tally: CorpusStats,
    reject: Reject,
    part: tuple[int, int] | None,
) -> Iterator[Document]:
    columns = () if options.template is not None else (options.text_field,)
    with open_file(path, kind.compression) as (stream, raw):
        tally.opened(raw, tally.files_done_bytes)
        where = ""
        for where, record in iter_records(kind.kind, stream, columns, record_fields(options), part):
            try:
                if isinstance(record, BadDataError):
                    raise record
                document = _record_document(f"{name}{where}", record, options)
            except BadDataError as error:
                reject(f"{name}{where}", error)
            else:
                yield document
        if not where and not tally.without_records:
            rows = "rows below a header" if kind.kind in ("csv", "tsv") else "records"
            tally.without_records = f"{printable(name)} has no {rows}"


def record_fields(options: ReadOptions) -> tuple[str, ...]:
    """Fields of which a record has at least one."""
    own_field = options.text_field if options.template is None else options.prompt_field
    return (*RECORD_FIELDS, own_field) if own_field else RECORD_FIELDS


def _record_document(name: str, record: Any, options: ReadOptions) -> Document:
    if not isinstance(record, dict):
        raise BadDataError("data-bad-json", "not an object with fields")
    if options.template is None:
        return Document(name, _record_text(record, options.text_field))
    conversation = read_conversation(record, name, options.prompt_field, options.answer_field)
    try:
        parts = options.template.render(conversation, options.special_tokens)
    except ValueError as error:
        raise BadDataError("data-bad-conversation", str(error)) from error
    return Document(name, "".join(part.text for part in parts), parts)


def _record_text(record: dict[str, Any], text_field: str) -> str:
    if text_field not in record:
        reason = f"no field {text_field!r}; its fields are {', '.join(map(str, record))}"
        if holds_conversation(record):
            reason, fix = (
                f"a conversation, which needs a template ({reason})",
                "Set template (in a job: data.template): tokenizer for that of model.hf, or chatml",
            )
            raise BadDataError("data-needs-template", reason, fix)
        fix = "Set text_field (in a job: data.text_field) to the field with the text"
        raise BadDataError("data-field-missing", reason, fix)
    text = record[text_field]
    if not isinstance(text, str):
        kind = "null" if text is None else f"of type {type(text).__name__}"
        raise BadDataError("data-field-not-text", f"the field {text_field!r} is {kind}, not text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise BadDataError("data-not-utf8", "its text is not valid Unicode") from error
    return text
