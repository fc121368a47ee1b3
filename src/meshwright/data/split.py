"""Splits documents into train and eval.

The rules, in this order:

1.  A document is held out if the keyed hash of its text, as a fraction, is below ``eval_fraction``. Nothing
    else matters, so adding documents or moving them between files never changes the split of a document.
2.  If all documents fall on one side, and there are at least two, the document with the hash nearest to the
    threshold goes to the other side. This can change only when documents are added.
3.  A single document is split: its last ``eval_fraction`` of tokens, at least one, are held out.

``eval_fraction=1`` makes an evaluation set: all documents are held out, and rules 2 and 3 do not apply.

It works on a stream. Until both sides have a document, the one nearest to the threshold is held back, because
rule 2 might move it. It may come later than in the input, but always at the same position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

from meshwright.data.corpus import Document

Side = Literal["train", "eval", "both"]
"""``both`` is the only document of a corpus, which is split."""

_SCALE = 2**64


def split_hash(pieces: Iterable[str], seed: int) -> int:
    """64 bits of the keyed hash of a text; the key has the seed and the version of the rules."""
    digest = hashlib.blake2b(digest_size=8, key=b"meshwright split 1" + (seed % _SCALE).to_bytes(8, "little"))
    for piece in pieces:
        digest.update(piece.encode("utf-8"))
    return int.from_bytes(digest.digest(), "little")


def assign_splits(
    documents: Iterable[Document], eval_fraction: float, seed: int
) -> Iterator[tuple[Side, Document]]:
    """Assign each document to a split; see the rules above."""
    if eval_fraction == 1:
        yield from (("eval", document) for document in documents)
        return
    threshold = int(eval_fraction * _SCALE)
    held: tuple[Side, int, Document] | None = None
    passed_on = 0
    settled = False
    for document in documents:
        value = split_hash(document.pieces(), seed)
        side: Side = "eval" if value < threshold else "train"
        if settled:
            yield side, document
        elif held is None:
            held = side, abs(value - threshold), document
        elif side != held[0]:
            settled = True
            yield held[0], held[2]
            yield side, document
        else:
            nearer, farther = sorted(
                (held, (side, abs(value - threshold), document)), key=lambda item: item[1]
            )
            held = nearer
            passed_on += 1
            yield side, farther[2]
    if held is not None and not settled:
        other: Side = "train" if held[0] == "eval" else "eval"
        alone: Side = "train" if held[2].parts else "both"  # a conversation is never split
        yield (other if passed_on else alone), held[2]


def split_document(tokens: int, eval_fraction: float) -> int:
    """Where the only document is split: tokens before go to train, the others are held out.

    A single token is not split. A byte-level token may be a part of a character, so the split may be inside
    one.
    """
    return tokens - min(max(1, round(tokens * eval_fraction)), tokens - 1)
