"""Examines the text of a document in one pass: hashes, counts, and the verdict of the filter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.data.steps.filters import FilterSpec, TextCounts, failed_rule
from meshwright.data.steps.near_duplicates import MinHash

_SCALE = 2**64
_NO_BANDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class StepOptions:
    """The optional steps of a corpus."""

    normalize: bool = False
    filter: FilterSpec | None = None
    near_duplicates: bool = False


@dataclass(frozen=True)
class TextFacts:
    """Results of the steps for one text."""

    digest: bytes
    """BLAKE2b, 16 bytes: equal for exact duplicates."""
    size: int
    """UTF-8 bytes."""
    characters: int
    dropped_by: str | None
    """The rule of ``[filter]`` that drops it."""
    bands: npt.NDArray[np.int64]
    """Band hashes; empty without near-duplicate removal."""


def examine_text(pieces: Iterable[str], options: StepOptions) -> TextFacts:
    """Examine a text."""
    digest, size, characters = hashlib.blake2b(digest_size=16), 0, 0
    counts = TextCounts() if options.filter else None
    signature = MinHash() if options.near_duplicates else None
    for piece in pieces:
        utf8 = piece.encode("utf-8")
        digest.update(utf8)
        size += len(utf8)
        characters += len(piece)
        if counts is not None:
            counts.add(piece)
        if signature is not None:
            signature.add(piece)
    rule = failed_rule(counts, options.filter) if counts is not None and options.filter else None
    bands = signature.bands() if signature is not None else _NO_BANDS
    return TextFacts(digest.digest(), size, characters, rule, bands)


def shuffle_key(digest: bytes, seed: int) -> int:
    """The place of a document in a shuffled corpus: 63 bits of the keyed hash of its digest."""
    key = b"meshwright shuffle 1" + (seed % _SCALE).to_bytes(8, "little")
    hashed = hashlib.blake2b(digest, digest_size=8, key=key).digest()
    return int.from_bytes(hashed, "little") >> 1
