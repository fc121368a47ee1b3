"""Which documents are held out for evaluation.

The rule, in this order:

1.  A keyed hash of the document's text, read as a fraction, decides: below ``eval_fraction`` the document is
    held out. The decision looks at nothing else, so adding documents, or moving them between files, never
    moves a document from one split to the other.
2.  If all documents fall on one side, and there are two or more, the document whose hash is nearest to the
    threshold goes to the other side. This can change when documents are added, and only then.
3.  A corpus of one document is cut inside: its last ``eval_fraction`` of tokens, at least one, are held out.

It works on a stream. Until both sides have a document, the one nearest to the threshold is held back (it is
the one that rule 2 would move); so it may come later than its place, always at the same later place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

from meshwright.data.corpus import Document

Side = Literal["train", "eval", "both"]
"""``both`` is the only document of a corpus, to be cut inside."""

_SCALE = 2**64


def split_hash(text: str, seed: int) -> int:
    """64 bits of the text's keyed hash; the key carries the seed and the rule's version."""
    key = b"meshwright split 1" + (seed % _SCALE).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=key).digest(), "little")


def assign_splits(
    documents: Iterable[Document], eval_fraction: float, seed: int
) -> Iterator[tuple[Side, Document]]:
    """Give each document its side; see the module for the rule."""
    threshold = int(eval_fraction * _SCALE)
    held: tuple[Side, int, Document] | None = None
    passed_on = 0
    settled = False
    for document in documents:
        value = split_hash(document.text, seed)
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
        alone: Side = "train" if held[2].parts else "both"  # a conversation is never cut
        yield (other if passed_on else alone), held[2]


def split_document(tokens: int, eval_fraction: float) -> int:
    """Where the only document is cut: the tokens before go to train, the others are held out.

    Nothing is held out only of a single token. A byte-level token may be a part of a character, so the cut
    may be inside one.
    """
    return tokens - min(max(1, round(tokens * eval_fraction)), tokens - 1)
