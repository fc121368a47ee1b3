"""Prepares a corpus: reads its documents and writes a prepared folder, in one process.

It makes one pass over the text, or two if it trains a BPE tokenizer. Memory: a batch of documents, 16 bytes
per document, and 8 per document of the open shards. The same input gives the same bytes on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.data.chat_templates import load_template
from meshwright.data.corpus import CorpusStats, Document, ReadOptions, iter_corpus
from meshwright.data.corpus_spec import CorpusSpec, load_corpus_spec
from meshwright.data.encode import encode_documents, text_between_markers
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder, is_prepared_folder
from meshwright.data.sources import locate
from meshwright.data.split import Side, assign_splits, split_document
from meshwright.data.staging import staged_folder
from meshwright.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer_name,
)

__all__ = ["CorpusSpec", "PrepareReport", "Progress", "load_corpus_spec", "prepare_corpus"]

Progress = Callable[[int, int], None]
"""Called with the number of documents and bytes of text so far."""

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 2 * 1024**2


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


def prepare_corpus(spec: CorpusSpec, base: Path, progress: Progress | None = None) -> PrepareReport:
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
        options = ReadOptions(spec.text_field, template or None, spec.prompt_field, spec.answer_field)
        tokenizer = _build_tokenizer(spec, base, out, options)
        options = replace(options, special_tokens=tuple(tokenizer.special_tokens))
        documents = iter_corpus(spec.sources, base, options=options, exclude=(out,), tally=tally)
        assigned = assign_splits(documents, spec.eval_fraction, spec.seed)
        has_loss_mask = options.template is not None
        with ShardWriter(
            folder, tokenizer, spec.shard_tokens, shown=out, has_loss_mask=has_loss_mask
        ) as writer:
            for batch in _batches(assigned):
                _write_batch(batch, tokenizer, writer, spec.eval_fraction)
                if progress is not None:
                    progress(tally.documents_in, tally.text_bytes)
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


def _build_tokenizer(spec: CorpusSpec, base: Path, out: Path, options: ReadOptions) -> Tokenizer:
    choice = parse_tokenizer_name(spec.tokenizer, key="tokenizer")
    if choice.kind == "byte":
        return ByteTokenizer()
    if choice.kind == "file":
        return load_tokenizer(locate(choice.path, base))
    documents = iter_corpus(spec.sources, base, options=options, exclude=(out,))
    if options.template is None:
        return BpeTokenizer.train((document.text for document in documents), choice.vocab_size)
    markers = options.template.markers
    texts = (text for document in documents for text in text_between_markers(document.parts, markers))
    return BpeTokenizer.train(texts, choice.vocab_size, markers)


def _batches(assigned: Iterable[tuple[Side, Document]]) -> Iterator[list[tuple[Side, Document]]]:
    """Group documents into batches that keep all cores busy and fit into memory."""
    batch: list[tuple[Side, Document]] = []
    characters = 0
    for item in assigned:
        batch.append(item)
        characters += len(item[1].text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_batch(
    batch: list[tuple[Side, Document]], tokenizer: Tokenizer, writer: ShardWriter, eval_fraction: float
) -> None:
    encoded = encode_documents(tokenizer, [document for _, document in batch])
    for (side, _), document in zip(batch, encoded, strict=True):
        if side != "both":
            writer.add(side, document.tokens, document.loss_mask)
            continue
        at = split_document(len(document.tokens), eval_fraction)
        for name, part in (("train", slice(0, at)), ("eval", slice(at, None))):
            if len(tokens := document.tokens[part]):
                writer.add(name, tokens, None if document.loss_mask is None else document.loss_mask[part])
