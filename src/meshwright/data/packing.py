"""Packs the tokens of one shard into rows of ``seq_len`` positions.

A position is an input token and its target, the next token. A packing has a number of rows, and the pieces
of the shard that make up each row. It depends on (shard, seq_len) only, so appended shards renumber nothing.

*   :class:`ContiguousPacking`, for attention across documents: row ``i`` is positions ``i * seq_len`` to
    ``(i + 1) * seq_len``. An incomplete row at the end of the shard is dropped, or padded for evaluation.
*   :class:`DocumentPacking`, for attention within documents: rows of whole documents, in order. A document
    goes into the current row if it fits, otherwise into a new one (next-fit). A document of ``n`` tokens,
    including its end token, has ``n - 1`` positions, because its first token is no target. A document longer
    than a row is split into rows and a rest. The rest of a row is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowPieces:
    """Pieces of a shard, sorted by row and by position in it."""

    row: Int64s
    """Index into the requested rows."""
    offset: Int64s
    """First position in the row."""
    begin: Int64s
    """First input token in the shard."""
    size: Int64s
    """Number of positions, at least one."""
    number: Int64s
    """Index of the piece in its row."""


class Packing(Protocol):
    """The rows of one shard."""

    rows: int

    def pieces(self, rows: Int64s) -> RowPieces:
        """The pieces of the requested rows."""

    def count_positions(self) -> Int64s:
        """Positions per row without padding."""

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """Targets with loss per row; the mask has one byte per token."""


class ContiguousPacking:
    """Contiguous rows across documents."""

    def __init__(self, tokens: int, seq_len: int, pad_last: bool = False) -> None:
        """Split a shard of ``tokens`` tokens; an incomplete last row is padded or dropped."""
        positions = tokens - 1
        self.rows = -(-positions // seq_len) if pad_last else positions // seq_len
        self._seq_len = seq_len
        self._positions = min(positions, self.rows * seq_len)

    def pieces(self, rows: Int64s) -> RowPieces:
        """One piece per row."""
        none, begin = np.zeros_like(rows), rows * self._seq_len
        size = np.minimum(self._seq_len, self._positions - begin)
        return RowPieces(np.arange(rows.size), none, begin, size, none)

    def count_positions(self) -> Int64s:
        """Positions per row without padding: only the last one may have some."""
        return np.minimum(self._seq_len, self._positions - np.arange(self.rows) * self._seq_len)

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """Targets with loss per row; the first target is the second token of the shard."""
        if self.rows == 0:
            return np.zeros(0, dtype=np.int64)
        starts = np.arange(self.rows) * self._seq_len
        return np.add.reduceat(loss_mask[1 : 1 + self._positions], starts, dtype=np.int64)


class DocumentPacking:
    """Rows of whole documents. Memory: 16 bytes per document and 8 per row."""

    def __init__(self, starts: npt.NDArray[np.uint64], tokens: int, seq_len: int) -> None:
        """Pack a shard.

        Args:
            starts: First token of each document.
            tokens: Number of tokens.
            seq_len: Positions per row.
        """
        first = starts.astype(np.int64)
        positions = np.diff(first, append=tokens) - 1
        cuts = -(-positions // seq_len)  # pieces per document: none for a lone end token
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
        """Positions per row without padding."""
        return np.diff(self._ends[self._first])

    def count_loss_targets(self, loss_mask: npt.NDArray[np.uint8]) -> Int64s:
        """Targets with loss per row."""
        if self.rows == 0:
            return np.zeros(0, dtype=np.int64)
        # Sums between adjacent bounds: the targets of a document, then the tokens up to the next one.
        bounds = np.stack((self._begins, self._begins + np.diff(self._ends)), axis=1).reshape(-1) + 1
        if bounds[-1] == loss_mask.size:
            bounds = bounds[:-1]
        counts = np.add.reduceat(loss_mask, bounds, dtype=np.int64)[::2]
        total = np.concatenate(([0], np.cumsum(counts)))
        return np.diff(total[self._first])


def _next_fit(ends: Int64s, seq_len: int) -> Int64s:
    """The first piece of each row, and the number of pieces; ``ends`` are cumulative sizes."""
    # For each piece: the first one that does not fit into a row that starts with it.
    following = (np.searchsorted(ends, ends[:-1] + seq_len, side="right") - 1).tolist()
    first, piece = [0], 0
    while piece < len(following):
        piece = following[piece]
        first.append(piece)
    return np.asarray(first, dtype=np.int64)
