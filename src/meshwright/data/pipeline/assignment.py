"""In the driver: which documents are kept, and on which side of the split each is.

The rules are those of ``split.assign_splits``. There, the document nearest to the threshold is held back
until a nearer one comes or both sides have one; here it gets the place of the document that ended the wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.corpus import MAX_NAMED, CorpusStats
from meshwright.data.engines.work_folder import read_batches
from meshwright.data.pipeline.duplicates import DUPLICATE, NEAR_DUPLICATE
from meshwright.data.pipeline.scan import EMPTY, FILTERED, OK, QUARANTINED

TRAIN, EVAL = 0, 1
_SCALE = 2**64

Place = tuple[int, int]
"""Split, and row in it."""


@dataclass(frozen=True)
class Assignment:
    """How the documents are assigned; small, so that every task has it."""

    threshold: int
    """Hashes below it are held out; 2^64 for an evaluation set."""
    moved: dict[Place, Place] = field(default_factory=dict)
    """Documents that were held back, and their places in the order: a few."""
    changed: tuple[Place, int] | None = None
    """A document that is on the other side than its hash says."""
    single: bool = False
    """Whether the only document is split."""


@dataclass(frozen=True)
class Kept:
    """The documents of one split after all drops."""

    status: npt.NDArray[np.int32]
    dropped: npt.NDArray[np.int32]
    """0, or why an earlier document replaces it."""
    values: npt.NDArray[np.uint64]
    columns: dict[str, npt.NDArray[np.int64]]

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """The documents that are kept."""
        kept: npt.NDArray[np.bool_] = (self.status == OK) & (self.dropped == 0)
        return kept


def read_kept(keys: Path, drops: Path | None) -> Kept:
    """Read what the scan and the shuffles found about one split."""
    names = ("status", "value", "key", "size", "characters", "sample_characters")
    parts: dict[str, list[Any]] = {name: [np.empty(0, dtype=np.int64)] for name in names}
    for batch in read_batches(keys):
        for name in names:
            parts[name].append(batch.column(name).fill_null(0).to_numpy().astype(np.int64))
    columns = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    dropped = np.zeros(columns["status"].size, dtype=np.int32)
    for batch in read_batches(drops) if drops is not None else ():
        rows, kinds = batch.column("row").to_numpy(), batch.column("kind").to_numpy()
        near = rows[kinds != DUPLICATE]
        dropped[near] = np.where(dropped[near] == DUPLICATE, DUPLICATE, NEAR_DUPLICATE)
        dropped[rows[kinds == DUPLICATE]] = DUPLICATE
    return Kept(columns["status"].astype(np.int32), dropped, columns["value"].view(np.uint64), columns)


@dataclass
class DocumentCounts:
    """Counts of documents, from which the driver assigns them to splits."""

    tally: CorpusStats = field(default_factory=CorpusStats)
    sample_characters: int = 0
    filtered_by: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """Kept documents by the bit length of their number of characters."""
    first_bad: dict[str, Any] | None = None
    """The first record that the job does not allow to be left out."""
    rows: int = 0


def count_documents(keys: Sequence[Path], drops: dict[int, Path]) -> DocumentCounts:
    """Count all documents."""
    counts = DocumentCounts()
    tally = counts.tally
    for number, path in enumerate(keys):
        kept = read_kept(path, drops.get(number))
        mask, in_question = kept.mask, kept.status == OK
        tally.documents_in += kept.status.size
        tally.documents_out += int(mask.sum())
        tally.duplicates += int((in_question & (kept.dropped == DUPLICATE)).sum())
        tally.near_duplicates += int((in_question & (kept.dropped > DUPLICATE)).sum())
        tally.empty += int((kept.status == EMPTY).sum())
        tally.filtered += int((kept.status == FILTERED).sum())
        tally.text_bytes += int(kept.columns["size"][mask].sum())
        counts.sample_characters += int(kept.columns["sample_characters"][mask].sum())
        bits = np.frexp(kept.columns["characters"][mask].astype(np.float64))[1]
        counts.lengths.update(bits.tolist())
        if (kept.status >= FILTERED).any():
            _count_bad(path, counts)
    counts.rows = tally.documents_in
    return counts


def _count_bad(path: Path, counts: DocumentCounts) -> None:
    for row in _bad_rows(path):
        if row["status"] == FILTERED:
            counts.filtered_by[row["reason"]] += 1
            continue
        tally = counts.tally
        tally.quarantined += 1
        if len(tally.quarantined_names) < MAX_NAMED:
            tally.quarantined_names.append(f"{row['name']}: {row['reason']}")
        if not row["value"] and counts.first_bad is None:
            counts.first_bad = row


def _bad_rows(path: Path) -> Iterator[dict[str, Any]]:
    names = ["status", "value", "name", "code", "reason", "fix"]
    for batch in read_batches(path):
        status = batch.column("status").to_numpy()
        for row in np.flatnonzero((status == FILTERED) | (status == QUARANTINED)).tolist():
            yield {name: batch.column(name)[row].as_py() for name in names}


def assign_sides(
    keys: Sequence[Path], drops: dict[int, Path], eval_fraction: float, documents: int, can_split: bool
) -> Assignment:
    """Assign all kept documents to a side.

    Args:
        keys: Results of the scan, by split.
        drops: Dropped documents, by split.
        eval_fraction: Share that is held out.
        documents: How many are kept.
        can_split: Whether an only document may be split; a conversation may not.
    """
    if eval_fraction == 1:
        return Assignment(_SCALE)
    threshold = int(eval_fraction * _SCALE)
    held: tuple[int, Place] | None = None  # distance and place
    held_out = False
    moved: dict[Place, Place] = {}
    for number, path in enumerate(keys):
        kept = read_kept(path, drops.get(number))
        rows = np.flatnonzero(kept.mask)
        values = kept.values[rows]
        if rows.size == 0:
            continue
        is_eval = values < np.uint64(threshold)
        held_out = bool(is_eval[0]) if held is None else held_out
        others = np.flatnonzero(is_eval != held_out)
        waiting = int(others[0]) if others.size else rows.size
        near = np.where(is_eval, np.uint64(threshold) - values, values - np.uint64(threshold))[:waiting]
        for at in _running_minima(near):
            place = number, int(rows[at])
            if held is None or int(near[at]) < held[0]:
                if held is not None:
                    moved[held[1]] = place
                held = int(near[at]), place
        if others.size and held is not None:
            moved[held[1]] = number, int(rows[waiting])
            return Assignment(threshold, moved)
    assert held is not None, "an empty corpus is an error before"
    if documents == 1:
        return Assignment(threshold, moved, (held[1], TRAIN), single=can_split)
    return Assignment(threshold, moved, (held[1], TRAIN if held_out else EVAL))


def _running_minima(values: npt.NDArray[np.uint64]) -> list[int]:
    """The places of values that are smaller than all before."""
    if values.size == 0:
        return []
    smallest = np.minimum.accumulate(values)
    return [0, *(np.flatnonzero(smallest[1:] < smallest[:-1]) + 1).tolist()]
