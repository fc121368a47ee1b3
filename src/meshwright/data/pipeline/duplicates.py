"""Shuffles that find exact and near-duplicates: the first document of a group is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.engines.stages import BUCKET, Batches, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import arrow, read_batches
from meshwright.data.pipeline.scan import OK, keys_schema

DUPLICATE, NEAR_DUPLICATE = 1, 2
"""Why a document is dropped."""

_DIGEST = ("digest_high", "digest_low")
_PLACE = ("split", "row")


@dataclass(frozen=True)
class BandTask:
    """The keys of one split, whose bands become rows."""

    keys: Path
    buckets: int


def drops_schema() -> Any:
    """A dropped document; the bucket is its split."""
    pa = arrow()
    return pa.schema([(BUCKET, pa.int32()), ("split", pa.int32()), ("row", pa.int64()), ("kind", pa.int32())])


def _bands_schema() -> Any:
    pa = arrow()
    return pa.schema([(BUCKET, pa.int32()), ("band", pa.int64()), ("split", pa.int32()), ("row", pa.int64())])


def duplicates_stage() -> ShuffleStage:
    """Groups by the digest of the text."""
    names = (BUCKET, *_DIGEST, *_PLACE, "status")
    schema = arrow().schema([keys_schema().field(name) for name in names])
    return ShuffleStage("duplicates", (*_DIGEST, *_PLACE), drop_later_texts, schema, drops_schema())


def bands_stage() -> MapStage:
    """One row per document and band."""
    return MapStage("bands", list_bands, _bands_schema())


def near_duplicates_stage() -> ShuffleStage:
    """Groups by band."""
    return ShuffleStage(
        "near-duplicates", ("band", *_PLACE), drop_later_bands, _bands_schema(), drops_schema()
    )


def drops_stage() -> ShuffleStage:
    """All dropped documents by split."""
    return ShuffleStage("drops", (*_PLACE, "kind"), unchanged, drops_schema(), drops_schema())


def drop_later_texts(batches: Batches) -> Batches:
    """All but the first document of each digest."""
    return _drop_later(batches, _DIGEST, DUPLICATE)


def drop_later_bands(batches: Batches) -> Batches:
    """All but the first document of each band; a document comes once for every band that it shares."""
    return _drop_later(batches, ("band",), NEAR_DUPLICATE)


def unchanged(batches: Batches) -> Batches:
    """The rows as they are: the sort was the work."""
    return batches


def _drop_later(batches: Batches, group: Sequence[str], kind: int) -> Batches:
    pa, schema = arrow(), drops_schema()
    last: tuple[Any, ...] | None = None
    for batch in batches:
        if "status" in batch.schema.names:
            batch = batch.filter(pa.array(batch.column("status").to_numpy() == OK))  # noqa: PLW2901
        if batch.num_rows == 0:
            continue
        columns = [batch.column(name).to_numpy() for name in group]
        later = np.zeros(batch.num_rows, dtype=bool)
        later[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
        later[0] = last == tuple(column[0] for column in columns)
        last = tuple(column[-1] for column in columns)
        split, row = (batch.column(name).to_numpy()[later] for name in _PLACE)
        if split.size:
            kinds = np.full(split.size, kind, dtype=np.int32)
            yield pa.RecordBatch.from_arrays([pa.array(c) for c in (split, split, row, kinds)], schema=schema)


def list_bands(task: BandTask) -> Batches:
    """The bands of the documents of a split."""
    pa, schema = arrow(), _bands_schema()
    for batch in read_batches(task.keys):
        lists = batch.column("bands")
        counts = np.diff(lists.offsets.to_numpy()) * lists.is_valid().to_numpy(zero_copy_only=False)
        bands = lists.flatten().to_numpy()
        split, row = (np.repeat(batch.column(name).to_numpy(), counts) for name in _PLACE)
        bucket = (bands % task.buckets).astype(np.int32)
        yield pa.RecordBatch.from_arrays([pa.array(c) for c in (bucket, bands, split, row)], schema=schema)
