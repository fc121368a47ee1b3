"""The first map: reads a split and extracts from each document the facts that depend on its text alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.data.chat import Template
from meshwright.data.chat_templates import load_template
from meshwright.data.corpus import CorpusStats, Document, ReadOptions, read_file, unreadable_file
from meshwright.data.corpus_spec import CorpusSpec
from meshwright.data.encode import text_between_markers
from meshwright.data.engines.stages import BUCKET, Batches, MapStage
from meshwright.data.engines.work_folder import BATCH_ROWS, arrow
from meshwright.data.files import BadDataError
from meshwright.data.pipeline.splits import FilePart, InputSplit
from meshwright.data.sources import printable
from meshwright.data.split import split_hash
from meshwright.data.steps.examine import StepOptions, TextFacts, examine_text, shuffle_key

OK, EMPTY, FILTERED, QUARANTINED = range(4)
"""The status of a document after the scan."""

_COUNT_BYTES = 1024**2


@dataclass(frozen=True)
class CorpusTask:
    """The settings of every task that reads a split."""

    spec: CorpusSpec
    base: Path
    buckets: int
    special_tokens: tuple[str, ...] = ()

    @cached_property
    def template(self) -> Template | None:
        """The chat template, if the corpus has one."""
        spec = self.spec
        return load_template(spec.template, self.base, spec.tokenizer, "template") if spec.template else None

    @cached_property
    def options(self) -> ReadOptions:
        """How files are read."""
        spec = self.spec
        steps = StepOptions(spec.normalize, spec.filter, spec.near_duplicates)
        fields = (spec.text_field, self.template, spec.prompt_field, spec.answer_field)
        return ReadOptions(*fields, special_tokens=self.special_tokens, steps=steps)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed again in another process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class ScanTask:
    """One split to scan."""

    corpus: CorpusTask
    split: InputSplit


@dataclass(frozen=True)
class Rejected:
    """A file or record that cannot be read."""

    name: str
    error: BadDataError
    skip: bool


@dataclass
class _Collector:
    """Takes rejected records in the order of the documents."""

    part: FilePart
    number_lines: bool
    """Whether names get the line in the whole file; it takes time, and only the scan reports them."""
    found: list[Rejected] = field(default_factory=list)

    def __call__(self, name: str, error: BadDataError) -> None:
        self.found.append(Rejected(self._in_file(name), error, self.part.skip_bad))

    def _in_file(self, name: str) -> str:
        """The name with the line number in the whole file."""
        begin = self.part.part[0] if self.part.part else 0
        match = re.fullmatch(r"(.*):(\d+)", name, re.DOTALL)
        if not begin or not match:
            return name
        if not self.number_lines:
            return match[1]
        return f"{match[1]}:{int(match[2]) + self._lines_before}"

    @cached_property
    def _lines_before(self) -> int:
        """Counted when the first bad record of the part is found."""
        return _lines_before(self.part.path, self.part.part[0] if self.part.part else 0)


def _lines_before(path: Path, begin: int) -> int:
    """Lines that start before an offset."""
    lines, left = 0, begin - 1
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, _COUNT_BYTES))):
            lines += block.count(b"\n")
            left -= len(block)
        return lines + 1 if begin else lines


def read_split(
    corpus: CorpusTask, split: InputSplit, number_lines: bool = False
) -> Iterator[Document | Rejected]:
    """The documents of a split in order, and what could not be read in its place.

    Args:
        corpus: The corpus.
        split: The split.
        number_lines: Whether the name of a bad record has its line in the whole file.

    Raises:
        UserError: A file has changed since the splits were made.
    """
    for part in split.parts:
        check_unchanged(part)
        collector = _Collector(part, number_lines)
        if part.unreadable is not None:
            collector(part.name, unreadable_file(part.unreadable))
        else:
            for document in read_file(
                part.name, part.path, corpus.options, CorpusStats(), collector, part.part
            ):
                yield from collector.found
                collector.found.clear()
                yield document
        yield from collector.found
        check_unchanged(part)


def check_unchanged(part: FilePart) -> None:
    """Compare a file with what the splits say: its size, its time, and whether it is there.

    Raises:
        UserError: It differs.
    """
    if part.unreadable is not None:
        return
    try:
        facts = part.path.stat()
    except OSError:
        now: tuple[int, int | None] = 0, None
    else:
        now = facts.st_size, facts.st_mtime_ns
    if now != (part.file_size, part.modified_ns):
        raise UserError(changed_problem(printable(part.name)))


def changed_problem(name: str) -> Problem:
    """Files are not what they were when the preparation started."""
    return Problem(
        "data-changed",
        "was changed during the preparation",
        path=name,
        fix="Start again when the files no longer change",
    )


def keys_schema() -> Any:
    """Columns of the scan: one row per document."""
    pa = arrow()
    numbers = ("digest_high", "digest_low", "value", "key", "size", "characters", "sample_characters")
    return pa.schema(
        [
            (BUCKET, pa.int32()),
            ("split", pa.int32()),
            ("row", pa.int64()),
            ("status", pa.int32()),
            *((name, pa.int64()) for name in numbers),
            ("bands", pa.list_(pa.int64())),
            ("name", pa.string()),
            ("code", pa.string()),
            ("reason", pa.string()),
            ("fix", pa.string()),
        ]
    )


def scan_stage() -> MapStage:
    """The stage."""
    return MapStage("scan", scan_split, keys_schema())


def scan_split(task: ScanTask) -> Batches:
    """Examine each document of a split."""
    pa, schema = arrow(), keys_schema()
    rows: list[dict[str, Any]] = []
    for number, item in enumerate(read_split(task.corpus, task.split, number_lines=True)):
        rows.append(_row(task.corpus, item) | {"split": task.split.number, "row": number})
        if len(rows) >= BATCH_ROWS // 4:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def _row(corpus: CorpusTask, item: Document | Rejected) -> dict[str, Any]:
    if isinstance(item, Document):
        try:
            facts = examine_text(item.pieces(), corpus.options.steps)
            return _document_row(corpus, item, facts)
        except BadDataError as error:  # a long text is decoded here
            item = Rejected(item.name, error, corpus.spec.on_bad_records == "skip")
    bad = item.error
    texts = {"name": printable(item.name), "code": bad.code, "reason": str(bad), "fix": bad.fix}
    return {BUCKET: 0, "status": QUARANTINED, "value": int(item.skip), **texts}


def _document_row(corpus: CorpusTask, document: Document, facts: TextFacts) -> dict[str, Any]:
    if facts.size == 0:
        return {BUCKET: 0, "status": EMPTY}
    if facts.dropped_by is not None:
        return {BUCKET: 0, "status": FILTERED, "reason": facts.dropped_by, "size": facts.size}
    high, low = (int.from_bytes(half, "little", signed=True) for half in (facts.digest[:8], facts.digest[8:]))
    value = split_hash(document.pieces(), corpus.spec.seed)
    return {
        BUCKET: high % corpus.buckets,
        "status": OK,
        "digest_high": high,
        "digest_low": low,
        "value": value - 2**64 if value >= 2**63 else value,  # Spark has no unsigned numbers
        "key": shuffle_key(facts.digest, corpus.spec.seed) if corpus.spec.shuffle else 0,
        "size": facts.size,
        "characters": facts.characters,
        "sample_characters": sum(map(len, sample_pieces(corpus, document)))
        if document.parts
        else facts.characters,
        "bands": facts.bands.tolist(),
    }


def sample_pieces(corpus: CorpusTask, document: Document) -> Iterator[str]:
    """The texts of a document that BPE may be trained on."""
    if not document.parts:
        return document.pieces()
    template = corpus.template
    return text_between_markers(document.parts, template.markers if template else ())
