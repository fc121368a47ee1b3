"""Which epoch a position is in, for data that grow: a table of (epoch, index hash, samples).

Data that grow become part of the running epoch: its samples so far keep their numbers and their order, and
the new ones follow. The new part of a last shard that has grown is shuffled by itself. The next epoch reads
everything as one corpus. The table is in the manifest of every checkpoint, so a position means the same
sample after a restart, on any number of ranks, also if the data have grown since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from meshwright.data.identity import SourceIdentity
from meshwright.data.order import WINDOW, SampleOrder
from meshwright.spec.fields import Natural

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EpochRow:
    """The data of an epoch, and of the later ones up to the next row."""

    epoch: Natural
    begin: Natural
    """The first position of the epoch."""
    samples: Annotated[int, Field(ge=1, lt=2**53)]
    """In the epoch; of several rows of one epoch the last one counts."""
    index_sha256: str
    """Hash of ``index.json``."""


EpochTable = tuple[EpochRow, ...]
"""Rows in order; several of one epoch if the data grew in it."""


@dataclass(frozen=True)
class CorpusState:
    """The data of a run at one position: the shards of each source, and the epochs so far."""

    sha256: str = ""
    """Hash of all sources, see ``growth.data_sha256``; of images, see ``images``."""
    sources: dict[str, SourceIdentity] = field(default_factory=dict)
    """Sources by name; empty for images and for data that come from elsewhere."""
    epochs: dict[str, EpochTable] = field(default_factory=dict)
    """Table of each source with samples."""

    @classmethod
    def first(cls, sha256: str, sources: dict[str, SourceIdentity]) -> CorpusState:
        """The state at position 0."""
        tables: dict[str, EpochTable] = {
            name: (EpochRow(0, 0, source.samples, source.index_sha256),)
            for name, source in sources.items()
            if source.samples
        }
        return cls(sha256, sources, tables)

    def grown(self, now: CorpusState, positions: Mapping[str, int]) -> CorpusState:
        """The state after the data have grown.

        Args:
            now: The grown data, at any position.
            positions: Samples read from each source.
        """
        tables = dict(self.epochs)
        for name, table in now.epochs.items():
            before, source = self.sources.get(name), now.sources[name]
            if name not in tables:
                tables[name] = table
            elif before is None or before.train != source.train:
                tables[name] = extend_table(tables[name], positions.get(name, 0), source)
        return CorpusState(now.sha256, now.sources, tables)

    def continued(self, now: CorpusState, positions: Mapping[str, int]) -> CorpusState:
        """The state to go on with from a checkpoint: the data may have grown before or after it.

        Args:
            now: The data when the run was started.
            positions: Positions of the checkpoint, see :meth:`grown`.
        """
        if not self.sources:
            return now
        grown = any(now.sources[name].length > old.length for name, old in self.sources.items())
        return self.grown(now, positions) if grown else self


def extend_table(table: EpochTable, position: int, source: SourceIdentity) -> EpochTable:
    """The table after a source has grown.

    An epoch whose samples are all read, and whose next one has not begun, is extended too: the new samples
    come before the old ones come again.

    Args:
        table: Before.
        position: Samples read from the source.
        source: After it has grown.
    """
    last = table[-1]
    ahead, offset = divmod(max(0, position - last.begin), last.samples)
    if ahead and not offset:
        ahead -= 1
    begin = last.begin + ahead * last.samples
    return (*table, EpochRow(last.epoch + ahead, begin, source.samples, source.index_sha256))


def order_of_epochs(
    shard_sample_counts: Sequence[int], seed: int, table: EpochTable | None
) -> SampleOrder | GrowingOrder:
    """The order of one source; without a table, or with one row, all epochs have the same samples."""
    if table is None or len(table) == 1:
        return SampleOrder(shard_sample_counts, seed)
    return GrowingOrder(shard_sample_counts, seed, table)


class GrowingOrder:
    """The sample at each position of data that have grown; like ``order.SampleOrder``, which it uses."""

    def __init__(
        self, shard_sample_counts: Sequence[int], seed: int, table: EpochTable, window: int = WINDOW
    ) -> None:
        """Fix the order.

        Args:
            shard_sample_counts: Samples in each shard of the newest index.
            seed: Seed of the run.
            table: Its last row is of the newest index.
            window: Samples per shuffle window.
        """
        assert table[-1].samples == sum(shard_sample_counts), "the table is of other data"
        self._ends: Int64s = np.cumsum(shard_sample_counts, dtype=np.int64)
        self._seed, self._window = seed, window
        groups = [list(rows) for _, rows in groupby(table, key=lambda row: row.epoch)]
        self._rows = [rows[-1] for rows in groups]
        self._parts: dict[int, list[int]] = {}
        """Where an epoch was extended, in samples; each but the first was begun with the data before."""
        before: list[EpochRow] = []
        for rows in groups:
            self._parts[rows[-1].epoch] = [row.samples for row in (*before, *rows)]
            before = rows[-1:]
        self._begins: Int64s = np.asarray([row.begin for row in self._rows], dtype=np.int64)
        self.samples_per_epoch = table[-1].samples

    def samples_at(self, positions: npt.ArrayLike) -> Int64s:
        """The samples at many positions, in the numbering of the dataset."""
        given: Int64s = np.asarray(positions, dtype=np.int64)
        flat = given.reshape(-1)
        samples = np.empty_like(flat)
        row = np.searchsorted(self._begins, flat, side="right") - 1
        sizes: Int64s = np.asarray([one.samples for one in self._rows], dtype=np.int64)
        first: Int64s = np.asarray([one.epoch for one in self._rows], dtype=np.int64)
        ahead, offset = np.divmod(flat - self._begins[row], sizes[row])
        epoch: Int64s = first[row] + ahead
        for number in np.unique(epoch).tolist():
            chosen = np.flatnonzero(epoch == number)
            order = self._order_of(number, int(sizes[row[chosen[0]]]))
            samples[chosen] = order.samples_in(epoch[chosen], offset[chosen])
        return samples.reshape(given.shape)

    def _order_of(self, epoch: int, samples: int) -> SampleOrder:
        """The order within an epoch: a part ends at each shard, and where the data grew."""
        shards = {int(end) for end in self._ends if end < samples}
        ends = sorted(shards | {*self._parts.get(epoch, ()), samples})
        return SampleOrder(np.diff(ends, prepend=0).tolist(), self._seed, self._window)
