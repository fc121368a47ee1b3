"""Encodes a stream of documents, long ones piece by piece, in batches that fit into memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.data.corpus import Document
from meshwright.data.encode import Encoded, encode_documents
from meshwright.data.tokenizer import Tokenizer

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 256 * 1024
"""The library takes about 130 bytes per character while it encodes."""
_BATCHES_IN_FLIGHT = 2


class Piece(NamedTuple):
    """A document, or a piece of a long one."""

    tag: Any
    """What the caller knows of the document."""
    document: Document
    ends: bool


def split_documents(documents: Iterable[tuple[Any, Document]]) -> Iterator[Piece]:
    """The pieces of tagged documents."""
    for tag, document in documents:
        if document.parts:
            yield Piece(tag, document, ends=True)
            continue
        before: str | None = None
        for text in document.pieces():
            if before is not None:
                yield Piece(tag, replace(document, text=before, read_pieces=None), ends=False)
            before = text
        yield Piece(tag, replace(document, text=before or "", read_pieces=None), ends=True)


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[list[tuple[Piece, Encoded]]]:
    """Encode batches in order, while the caller reads the next batch and writes the last one.

    The threads of the tokenizers library encode a batch, outside Python's lock. Two batches at a time keep
    them busy while Python converts the results.
    """

    def encode(batch: list[Piece]) -> list[tuple[Piece, Encoded]]:
        encoded = encode_documents(tokenizer, [piece.document for piece in batch])
        return list(zip(batch, encoded, strict=True))

    waiting: deque[Future[list[tuple[Piece, Encoded]]]] = deque()
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


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into batches that keep all cores busy and fit into memory."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
