"""Near-duplicates by MinHash and locality-sensitive hashing.

A document is dropped if an *earlier* document shares a band with it. The rule is not transitive: it does not
ask whether the earlier document was itself dropped. So it is one minimum per band, and every engine finds the
same documents, in any order of work.

*   A shingle is the 24 bytes from the start of a word, in lower case with single spaces: four or five
    words of English.
*   One-permutation MinHash (Li, Owen and Zhang, 2012): each shingle is hashed once; its hash chooses one of
    128 bins, and a bin keeps its minimum. An empty bin takes the value of the next one that is not empty
    (Shrivastava and Li, 2014).
*   16 bands of 8 bins. Two documents with a Jaccard similarity s of shingles share a band with probability
    1 - (1 - s^8)^16: 0.1% at 0.3, 6% at 0.5, 61% at 0.7, 95% at 0.8, 99.99% at 0.9.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.data.splitmix import GOLDEN, Uint64s, mix

BANDS = 16
ROWS = 8
SHINGLE_BYTES = 24

_BINS = BANDS * ROWS
_EMPTY = np.uint64(2**64 - 1)
_SPACE = 0x20


class MinHash:
    """The signature of one text, piece by piece."""

    def __init__(self) -> None:
        self._bins: Uint64s = np.full(_BINS, _EMPTY, dtype=np.uint64)

    def add(self, piece: str) -> None:
        """Add the shingles of a piece."""
        text = " ".join(piece.lower().split()).encode("utf-8", "replace")
        if not text:
            return
        data = np.frombuffer(text + bytes(SHINGLE_BYTES), dtype=np.uint8)
        starts = np.concatenate(([0], np.flatnonzero(data[: len(text)] == _SPACE) + 1))
        windows = data[starts[:, None] + np.arange(SHINGLE_BYTES)]
        words = np.ascontiguousarray(windows).view("<u8").astype(np.uint64)
        hashes = mix(words[:, 0] + GOLDEN)
        for column in range(1, words.shape[1]):
            hashes = mix(hashes ^ (words[:, column] + GOLDEN))
        np.minimum.at(self._bins, (hashes & np.uint64(_BINS - 1)).astype(np.int64), hashes)

    def bands(self) -> npt.NDArray[np.int64]:
        """One hash per band; documents that share one are near-duplicates. None for a text without words."""
        filled = np.flatnonzero(self._bins != _EMPTY)
        if filled.size == 0:
            return np.empty(0, dtype=np.int64)
        # The next filled bin, cyclically.
        following = filled[np.searchsorted(filled, np.arange(_BINS)) % filled.size]
        signature = self._bins[following].reshape(BANDS, ROWS)
        hashes = mix(np.arange(1, BANDS + 1, dtype=np.uint64) * GOLDEN)
        for row in range(ROWS):
            hashes = mix(hashes ^ (signature[:, row] + GOLDEN))
        return hashes.view(np.int64)
