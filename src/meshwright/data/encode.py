"""Encodes documents to tokens and loss masks.

Markers of a template become special tokens of the tokenizer, if it has them; the text of messages never does.
Text between special tokens is encoded at once, as the tokenizers library does, except that no token spans the
boundary of prompt and answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.chat import Span
from meshwright.data.corpus import Document
from meshwright.data.tokenizer import Tokenizer, Tokens

LossMask = npt.NDArray[np.uint8]
"""1 for a token that counts in the loss, else 0."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document, without its end-of-document token."""

    tokens: npt.NDArray[Any]
    loss_mask: LossMask | None
    """None for plain text: all tokens count."""


@dataclass(frozen=True)
class _Piece:
    """A special token, or text to encode."""

    text: str
    in_loss: bool
    special: bool


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
    """Encode documents in one batch."""
    specials = tokenizer.special_tokens
    pieces_of = [
        list(_pieces(d.parts, specials)) if d.parts else [_Piece(d.text, True, False)] for d in documents
    ]
    texts = [piece.text for pieces in pieces_of for piece in pieces if not piece.special]
    encoded = iter(tokenizer.encode_batch(texts))
    result = []
    for document, pieces in zip(documents, pieces_of, strict=True):
        tokens = [np.asarray([specials[p.text]]) if p.special else next(encoded) for p in pieces]
        if not document.parts:
            result.append(Encoded(tokens[0], None))
        else:
            result.append(_join(tokens, pieces, tokenizer.end_of_document))
    return result


def text_between_markers(parts: Sequence[Span], markers: Sequence[str]) -> Iterator[str]:
    """The text of a document without template markers, to train a tokenizer on."""
    return (piece.text for piece in _pieces(parts, markers) if not piece.special)


def _pieces(parts: Sequence[Span], specials: Sequence[str] | dict[str, int]) -> Iterator[_Piece]:
    """Split spans at boundaries of prompt and answer and at special tokens; join the text between."""
    longest_first = sorted(specials, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
    for in_loss, group in groupby(parts, key=lambda part: part.in_loss):
        text = ""
        for part in group:
            found = [part.text] if part.literal or pattern is None else pattern.split(part.text)
            text += found[0]
            for special, following in zip(found[1::2], found[2::2], strict=True):
                if text:
                    yield _Piece(text, in_loss, special=False)
                yield _Piece(special, in_loss, special=True)
                text = following
        if text:
            yield _Piece(text, in_loss, special=False)


def _join(tokens: Sequence[Tokens], pieces: Sequence[_Piece], end_of_document: int) -> Encoded:
    whole = np.concatenate(tokens)
    loss_mask = np.repeat(np.asarray([p.in_loss for p in pieces], np.uint8), [len(t) for t in tokens])
    if len(whole) > 1 and whole[-1] == end_of_document:  # the writer adds it, once
        return Encoded(whole[:-1], loss_mask[:-1])
    return Encoded(whole, loss_mask)
