"""Documents to tokens, and to which of them count in the loss.

Markers of a template become the tokenizer's special tokens where it has them; what a message spells never
does. Between special tokens, text is encoded in one go, as the tokenizer's own library would, except that a
token never spans the border of prompt and answer: else it would belong to both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.chat import Part
from meshwright.data.corpus import Document
from meshwright.data.tokenizer import Tokenizer, Tokens

Marks = npt.NDArray[np.uint8]
"""One for a token that counts in the loss, zero for one that does not."""


@dataclass(frozen=True)
class Encoded:
    """A document as tokens, without its end."""

    tokens: npt.NDArray[Any]
    marks: Marks | None
    """None for a plain text, all of which counts."""


@dataclass(frozen=True)
class _Piece:
    """A special token, or text to encode."""

    text: str
    counted: bool
    special: bool


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
    """Encode many documents; all their texts go to the tokenizer together."""
    specials = tokenizer.special_tokens
    cut = [list(_pieces(d.parts, specials)) if d.parts else [_Piece(d.text, True, False)] for d in documents]
    texts = [piece.text for pieces in cut for piece in pieces if not piece.special]
    encoded = iter(tokenizer.encode_batch(texts))
    result = []
    for document, pieces in zip(documents, cut, strict=True):
        tokens = [np.asarray([specials[p.text]]) if p.special else next(encoded) for p in pieces]
        if not document.parts:
            result.append(Encoded(tokens[0], None))
        else:
            result.append(_join(tokens, pieces, tokenizer.end_of_document))
    return result


def text_outside(parts: Sequence[Part], markers: Sequence[str]) -> Iterator[str]:
    """The text of a document without a template's markers: what a tokenizer is trained on."""
    return (piece.text for piece in _pieces(parts, markers) if not piece.special)


def _pieces(parts: Sequence[Part], specials: Sequence[str] | dict[str, int]) -> Iterator[_Piece]:
    """Cut parts at borders of prompt and answer and at special tokens; join what is left between."""
    longest_first = sorted(specials, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
    for counted, group in groupby(parts, key=lambda part: part.counted):
        text = ""
        for part in group:
            found = [part.text] if part.literal or pattern is None else pattern.split(part.text)
            text += found[0]
            for special, following in zip(found[1::2], found[2::2], strict=True):
                if text:
                    yield _Piece(text, counted, special=False)
                yield _Piece(special, counted, special=True)
                text = following
        if text:
            yield _Piece(text, counted, special=False)


def _join(tokens: Sequence[Tokens], pieces: Sequence[_Piece], end_of_document: int) -> Encoded:
    whole = np.concatenate(tokens)
    marks = np.repeat(np.asarray([p.counted for p in pieces], np.uint8), [len(t) for t in tokens])
    if len(whole) > 1 and whole[-1] == end_of_document:  # the writer adds it, once
        return Encoded(whole[:-1], marks[:-1])
    return Encoded(whole, marks)
