"""How the tokens of one shard are laid out in rows of ``seq_len`` positions.

A position is an input token together with its target, the token that follows it. Both packings answer the
same questions: how many rows there are, and which pieces of the shard a row is made of. Both are functions of
(shard, seq_len) alone, so that appending shards renumbers nothing.

*   :class:`ContiguousPacking`, for attention across documents: row ``i`` is positions ``i * seq_len`` to
    ``(i + 1) * seq_len``. What does not fill a row at the shard's end is dropped.
*   :class:`DocumentPacking`, for attention within documents: rows are made of whole documents, in order, each
    put into the open row if it fits and into a new one otherwise (next-fit). A document of ``n`` tokens,
    its end included, has ``n - 1`` positions, because its first token is nobody's target. One that is longer
    than a row is cut into rows and a rest. What is left of a row is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowPieces:
    """Stretches of a shard, one entry each, sorted by row and by place in it."""

    row: Int64s
    """Index into the rows that were asked for."""
    offset: Int64s
    """First position in the row."""
    begin: Int64s
    """First input token in the shard."""
    size: Int64s
    """Positions; at least one."""
    number: Int64s
    """How many pieces of the row come before it."""


class Packing(Protocol):
    """The rows of one shard."""

    rows: int

    def pieces(self, rows: Int64s) -> RowPieces:
        """What the rows asked for are made of."""

    def count_positions(self) -> Int64s:
        """Positions of each row that are not padding."""

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """Positions of each row whose target has a mark, where ``marks`` has one byte for each token."""


class ContiguousPacking:
    """Rows that ignore documents."""

    def __init__(self, tokens: int, seq_len: int) -> None:
        """Cut a shard of ``tokens`` tokens."""
        self.rows = (tokens - 1) // seq_len
        self._seq_len = seq_len

    def pieces(self, rows: Int64s) -> RowPieces:
        """One piece a row."""
        none = np.zeros_like(rows)
        return RowPieces(np.arange(rows.size), none, rows * self._seq_len, none + self._seq_len, none)

    def count_positions(self) -> Int64s:
        """All rows are full."""
        return np.full(self.rows, self._seq_len, dtype=np.int64)

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """The marks of each row's targets, which begin with the shard's second token."""
        targets = loss_mask[1 : 1 + self.rows * self._seq_len].reshape(self.rows, self._seq_len)
        counts: Int64s = np.count_nonzero(targets, axis=1).astype(np.int64)
        return counts


class DocumentPacking:
    """Rows of whole documents; 16 bytes of memory for each, and 8 for each row."""

    def __init__(self, starts: npt.NDArray[np.uint64], tokens: int, seq_len: int) -> None:
        """Pack a shard.

        Args:
            starts: Where its documents start.
            tokens: How many tokens it has.
            seq_len: Positions of a row.
        """
        first = starts.astype(np.int64)
        positions = np.diff(first, append=tokens) - 1
        cuts = -(-positions // seq_len)  # pieces of each document: none for one that is its end alone
        document = np.repeat(np.arange(first.size), cuts)
        before = np.arange(document.size) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        self._begins: Int64s = first[document] + before * seq_len
        sizes = np.minimum(seq_len, positions[document] - before * seq_len)
        self._ends: Int64s = np.concatenate(([0], np.cumsum(sizes)))
        self._first = _next_fit(self._ends, seq_len)
        self.rows = self._first.size - 1

    def pieces(self, rows: Int64s) -> RowPieces:
        """The documents of each row."""
        first, counts = self._first[rows], self._first[rows + 1] - self._first[rows]
        row = np.repeat(np.arange(rows.size), counts)
        number = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
        piece = first[row] + number
        begin, size = self._ends[piece], self._ends[piece + 1] - self._ends[piece]
        return RowPieces(row, begin - self._ends[first[row]], self._begins[piece], size, number)

    def count_positions(self) -> Int64s:
        """What the documents of each row fill."""
        return np.diff(self._ends[self._first])

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """The marks of each row's targets."""
        if self.rows == 0:
            return np.zeros(0, dtype=np.int64)
        # Sums between neighbouring bounds: a document's targets, then what lies between it and the next one.
        bounds = np.stack((self._begins, self._begins + np.diff(self._ends)), axis=1).reshape(-1) + 1
        if bounds[-1] == loss_mask.size:
            bounds = bounds[:-1]
        counts = np.add.reduceat(loss_mask, bounds, dtype=np.int64)[::2]
        total = np.concatenate(([0], np.cumsum(counts)))
        return np.diff(total[self._first])


def _next_fit(ends: Int64s, seq_len: int) -> Int64s:
    """The first piece of each row, and one past the last piece; ``ends`` are the pieces' running sums."""
    # For each piece: the first that no longer fits into a row which begins with it.
    following = (np.searchsorted(ends, ends[:-1] + seq_len, side="right") - 1).tolist()
    first, piece = [0], 0
    while piece < len(following):
        piece = following[piece]
        first.append(piece)
    return np.asarray(first, dtype=np.int64)
