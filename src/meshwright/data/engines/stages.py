"""Stages of a preparation, as data. A function must be importable: engines send it to other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Batches = Iterator[Any]
"""Arrow record batches."""

BUCKET = "bucket"
"""Column (int32) of the rows of a shuffle: rows of one bucket come to one place."""


@dataclass(frozen=True)
class MapStage:
    """One call per task; the batches of a call are one file."""

    name: str
    function: Callable[[Any], Batches]
    schema: Any
    """Arrow schema of the batches."""


@dataclass(frozen=True)
class ShuffleStage:
    """Rows grouped by bucket and sorted; one call and one file per bucket."""

    name: str
    order: tuple[str, ...]
    """Columns to sort by, all int32 or int64; together they are different for every row."""
    function: Callable[[Batches], Batches]
    """Gets the sorted rows of a bucket, batch by batch."""
    schema_in: Any
    schema: Any
    bucket_order: bool = False
    """Whether each input file has its rows in the order of buckets, and a bucket fits into memory. Then an
    engine may read and sort each bucket alone."""
