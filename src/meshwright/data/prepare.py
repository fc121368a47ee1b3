"""Prepares a corpus: reads its documents and writes a prepared folder, in one process.

Records and short text files are read once. A text file above 256 Ki characters is read three times: to find
duplicates, to choose its split, and to encode it. Training BPE reads all text once more, long files twice.
Memory: a few batches of documents and 16 bytes per document, whatever the size of the corpus; to train BPE, a
sample of the text and its words. The same input gives the same bytes on every machine.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.core.units import format_count, format_plural, format_rate
from meshwright.data.chat import Template
from meshwright.data.chat_templates import load_template
from meshwright.data.corpus import CorpusStats, Document, ReadOptions, iter_corpus
from meshwright.data.corpus_spec import CorpusSpec, load_corpus_spec
from meshwright.data.encode import Encoded, encode_documents, text_between_markers
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder, is_prepared_folder
from meshwright.data.sources import locate
from meshwright.data.split import Side, assign_splits, split_document
from meshwright.data.staging import staged_folder, storage_errors
from meshwright.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer_name,
)

__all__ = ["CorpusSpec", "PrepareReport", "Progress", "load_corpus_spec", "prepare_corpus"]

Progress = Callable[[str, CorpusStats], None]
"""Called with what is being done, and the counts so far."""

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 256 * 1024
"""The library takes about 130 bytes per character while it encodes."""
_BATCHES_IN_FLIGHT = 2
_COPIED_TOKENS = 1024**2

MOST_NAMED = 5
"""Unreadable documents that are named; ``--json`` has all."""


@dataclass(frozen=True)
class PrepareReport:
    """The result; ``meshwright prepare --json`` prints it."""

    engine: str
    """``embedded``."""
    documents_in: int
    """Documents read: ``documents_out + duplicates + empty + quarantined``."""
    documents_out: int
    """Documents written."""
    duplicates: int
    empty: int
    quarantined: int
    """Files, or lines of ``.jsonl`` files, that could not be read as text."""
    quarantined_names: tuple[str, ...]
    """``name: reason`` of the first thousand."""
    train_documents: int
    eval_documents: int
    """A single document is split: then train and eval have one each."""
    tokens: int
    """Tokens of both splits, including end-of-document tokens."""
    prompt_tokens: int
    """Tokens of prompts; 0 without a template."""
    shards: int
    sha256: str
    """Hash of the token files in index order, then the index."""
    seconds: float
    bytes_per_s: float
    """UTF-8 bytes of kept text per second."""
    out: str

    def as_dict(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return asdict(self)

    def describe(self) -> str:
        """One line about what was prepared, and one for each of the first unreadable documents."""
        prompts = f"({format_count(self.prompt_tokens)} of prompts) " if self.prompt_tokens else ""
        splits = f"{self.train_documents} to train on, {self.eval_documents} held out"
        if not self.train_documents:
            splits = "all for evaluation"
        done = (
            f"prepared {format_plural(self.documents_out, 'document')} ({splits}; "
            f"left out: {self.duplicates} duplicates, "
            f"{self.quarantined} unreadable) as {format_count(self.tokens)} tokens "
            f"{prompts}in {self.out}, "
            f"{format_rate(self.bytes_per_s, 'B')}"
        )
        named = self.quarantined_names[:MOST_NAMED]
        lines = [done, *(f"  left out: {name}" for name in named)]
        if self.quarantined > len(named):
            lines.append(f"  and {self.quarantined - len(named)} more")
        return "\n".join(lines)


def prepare_corpus(
    spec: CorpusSpec, base: Path, progress: Progress = lambda phase, tally: None
) -> PrepareReport:
    """Prepare a corpus. The folder is written atomically.

    Args:
        spec: The corpus.
        base: Folder of relative paths.
        progress: Called after each batch.

    Raises:
        UserError: A mistake in the spec, no text, or a storage error; no files are left behind.
    """
    started = time.monotonic()
    out = locate(spec.out, base)
    tally = CorpusStats()
    # The folder first: a write error should come before hours of reading.
    with staged_folder(out, may_replace=is_prepared_folder) as folder:
        template = spec.template and load_template(spec.template, base, spec.tokenizer, key="template")
        options = read_options(spec, template or None)
        tokenizer = _build_tokenizer(spec, base, out, options, progress)
        options = replace(options, special_tokens=tuple(tokenizer.special_tokens))
        documents = iter_corpus(spec.sources, base, options=options, exclude=(out,), tally=tally)
        assigned = assign_splits(documents, spec.eval_fraction, spec.seed)
        has_loss_mask = options.template is not None
        with (
            ShardWriter(folder, tokenizer, spec.shard_tokens, out, has_loss_mask) as writer,
            tempfile.TemporaryFile(dir=folder) as file,
        ):
            single = _SingleDocument(file, out)
            for batch in _encode_all(_pieces(assigned), tokenizer):
                for piece, encoded in batch:
                    if piece.side == "both":
                        single.add(encoded.tokens)
                    else:
                        writer.add(piece.side, encoded.tokens, encoded.loss_mask, piece.ends)
                progress("encoding", tally)
            single.write(writer, spec.eval_fraction)
            index = writer.finish()
            prompt_tokens = writer.prompt_tokens
        sha256 = ShardFolder(folder, index).content_sha256()
    seconds = time.monotonic() - started
    train, held_out = index.splits.train, index.splits.eval
    return PrepareReport(
        engine="embedded",
        documents_in=tally.documents_in,
        documents_out=tally.documents_out,
        duplicates=tally.duplicates,
        empty=tally.empty,
        quarantined=tally.quarantined,
        quarantined_names=tuple(tally.quarantined_names),
        train_documents=train.documents,
        eval_documents=held_out.documents,
        tokens=train.tokens + held_out.tokens,
        prompt_tokens=prompt_tokens,
        shards=len(index.shards),
        sha256=sha256,
        seconds=seconds,
        bytes_per_s=tally.text_bytes / max(seconds, 1e-9),
        out=str(out),
    )


def read_options(spec: CorpusSpec, template: Template | None) -> ReadOptions:
    """How the files of a corpus are read."""
    return ReadOptions(
        spec.text_field,
        template,
        spec.prompt_field,
        spec.answer_field,
        skip_bad=spec.on_bad_records == "skip",
    )


def train_tokenizer(
    documents: Iterable[Document], vocab_size: int, markers: Sequence[str], report: Callable[[], None]
) -> BpeTokenizer:
    """Train BPE on documents.

    Args:
        documents: To train on; an even sample if they are long.
        vocab_size: Of the tokenizer.
        markers: Of the templates of the documents; they become special tokens.
        report: Called after each document, and within long ones.
    """

    def texts() -> Iterator[str]:
        for document in documents:
            pieces = text_between_markers(document.parts, markers) if document.parts else document.pieces()
            for piece in pieces:
                report()
                yield piece

    return BpeTokenizer.train(texts(), vocab_size, markers)


def _build_tokenizer(
    spec: CorpusSpec, base: Path, out: Path, options: ReadOptions, progress: Progress
) -> Tokenizer:
    choice = parse_tokenizer_name(spec.tokenizer, key="tokenizer")
    if choice.kind == "byte":
        return ByteTokenizer()
    if choice.kind == "file":
        return load_tokenizer(locate(choice.path, base))
    tally = CorpusStats()
    documents = iter_corpus(spec.sources, base, options=options, exclude=(out,), tally=tally)
    return train_tokenizer(
        documents,
        choice.vocab_size,
        options.template.markers if options.template else (),
        lambda: progress("training the tokenizer", tally),
    )


class _Piece(NamedTuple):
    """A document, or a piece of a long one."""

    side: Side
    document: Document
    ends: bool


def _pieces(assigned: Iterable[tuple[Side, Document]]) -> Iterator[_Piece]:
    for side, document in assigned:
        if document.parts:
            yield _Piece(side, document, ends=True)
            continue
        before: str | None = None
        for text in document.pieces():
            if before is not None:
                yield _Piece(side, Document(document.name, before), ends=False)
            before = text
        yield _Piece(side, Document(document.name, before or ""), ends=True)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Group pieces into batches that keep all cores busy and fit into memory."""
    batch: list[_Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encode_all(pieces: Iterable[_Piece], tokenizer: Tokenizer) -> Iterator[list[tuple[_Piece, Encoded]]]:
    """Encode batches in order, while the caller reads the next batch and writes the last one.

    The threads of the tokenizers library encode a batch, outside Python's lock. Two batches at a time keep
    them busy while Python converts the results.
    """

    def encode(batch: list[_Piece]) -> list[tuple[_Piece, Encoded]]:
        encoded = encode_documents(tokenizer, [piece.document for piece in batch])
        return list(zip(batch, encoded, strict=True))

    waiting: deque[Future[list[tuple[_Piece, Encoded]]]] = deque()
    with ThreadPoolExecutor(_BATCHES_IN_FLIGHT) as pool:
        try:
            for batch in _batches(pieces):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > _BATCHES_IN_FLIGHT:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _SingleDocument:
    """The tokens of the only document of a corpus, in a file: it is split when its length is known."""

    def __init__(self, file: IO[bytes], shown: Path) -> None:
        self._file, self._shown, self._tokens = file, shown, 0

    def add(self, tokens: npt.NDArray[Any]) -> None:
        self._tokens += len(tokens)
        with storage_errors(self._shown):
            self._file.write(tokens.astype("<u4").tobytes())

    def write(self, writer: ShardWriter, eval_fraction: float) -> None:
        if self._tokens == 0:
            return
        at = split_document(self._tokens, eval_fraction)
        self._file.seek(0)
        for split, count in (("train", at), ("eval", self._tokens - at)):
            for begin in range(0, count, _COPIED_TOKENS):
                size = min(_COPIED_TOKENS, count - begin)
                tokens = np.frombuffer(self._file.read(4 * size), dtype="<u4")
                writer.add(split, tokens, ends=begin + size == count)
