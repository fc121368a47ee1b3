"""Prepares a corpus in one process: the reference, which every other engine equals byte for byte.

Records and short text files are read once. A text file above 256 Ki characters is read three times: to find
duplicates, to choose its split, and to encode it. Training BPE reads all text once more, long files twice.
Memory: a few batches of documents and 16 bytes per document, whatever the size of the corpus; to train BPE, a
sample of the text and its words; to remove near-duplicates, 16 hashes per document; to shuffle, all tokens.
The same input gives the same bytes on every machine. ``pipeline`` does the same on ``engines``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.chat import Template
from meshwright.data.chat_templates import load_template
from meshwright.data.corpus import CorpusStats, Document, ReadOptions, iter_corpus
from meshwright.data.corpus_spec import CorpusSpec, load_corpus_spec
from meshwright.data.encode import Encoded, text_between_markers
from meshwright.data.encode_pieces import Piece, encode_pieces, split_documents
from meshwright.data.growth import warn_of_replacement
from meshwright.data.prepare_report import PrepareReport, warn_of_vocabulary
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder, is_prepared_folder
from meshwright.data.sources import locate
from meshwright.data.split import Side, assign_splits, split_document
from meshwright.data.staging import staged_folder, storage_errors
from meshwright.data.steps.examine import StepOptions, shuffle_key
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

_COPIED_TOKENS = 1024**2


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
        shuffled = _Shuffled(spec.seed) if spec.shuffle else None
        with (
            ShardWriter(folder, tokenizer, spec.shard_tokens, out, has_loss_mask) as writer,
            tempfile.TemporaryFile(dir=folder) as file,
        ):
            single = _SingleDocument(file, out)
            for batch in encode_pieces(split_documents(assigned), tokenizer):
                for piece, encoded in batch:
                    if piece.tag == "both":
                        single.add(encoded.tokens)
                    elif shuffled is not None:
                        shuffled.add(piece, encoded)
                    else:
                        writer.add(piece.tag, encoded.tokens, encoded.loss_mask, piece.ends)
                progress("encoding", tally)
            if shuffled is not None:
                shuffled.write(writer)
            single.write(writer, spec.eval_fraction)
            index = writer.finish()
            prompt_tokens = writer.prompt_tokens
        sha256 = ShardFolder(folder, index).content_sha256()
        warnings = warn_of_replacement(out, folder)
    return PrepareReport.of(
        "reference",
        tally,
        index,
        prompt_tokens=prompt_tokens,
        sha256=sha256,
        seconds=time.monotonic() - started,
        out=out,
        warnings=[*warnings, *warn_of_vocabulary(spec.tokenizer, index)],
    )


def read_options(spec: CorpusSpec, template: Template | None) -> ReadOptions:
    """How the files of a corpus are read."""
    return ReadOptions(
        spec.text_field,
        template,
        spec.prompt_field,
        spec.answer_field,
        skip_bad=spec.on_bad_records == "skip",
        steps=StepOptions(spec.normalize, spec.filter, spec.near_duplicates),
    )


def train_tokenizer(
    documents: Iterable[Document], vocab_size: int, markers: Sequence[str], report: Callable[[], None]
) -> BpeTokenizer:
    """Train BPE on documents.

    Args:
        documents: To train on; an even sample if they are long.
        vocab_size: Vocabulary size of the tokenizer.
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


class _Shuffled:
    """Holds all tokens, and writes the documents in the order of their keyed hashes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._documents: list[tuple[int, int, list[tuple[Side, Encoded]]]] = []
        self._inside = False

    def add(self, piece: Piece, encoded: Encoded) -> None:
        if not self._inside:
            key = shuffle_key(piece.document.digest, self._seed)
            self._documents.append((key, len(self._documents), []))
        self._inside = not piece.ends
        self._documents[-1][2].append((piece.tag, encoded))

    def write(self, writer: ShardWriter) -> None:
        for _, _, pieces in sorted(self._documents, key=lambda document: document[:2]):
            for number, (side, encoded) in enumerate(pieces, start=1):
                writer.add(side, encoded.tokens, encoded.loss_mask, ends=number == len(pieces))


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
