"""The order of documents, the bounds of shards, and the map that writes them.

A shard is one task: it copies its tokens from the token files and writes ``train-00000.bin`` and so on. A
preparation that was killed goes on with the shards that are not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.engines.stages import Batches, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import arrow, new_file, read_batches
from meshwright.data.pipeline.duplicates import unchanged
from meshwright.data.pipeline.tokenize import mask_path, rows_schema, token_path
from meshwright.data.shards import SPLITS, ShardEntry

_BLOCK_TOKENS = 512 * 1024
_FILES_OPEN = 64

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowRange:
    """Rows of a file with the order of documents."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class ShardTask:
    """One shard to write."""

    side: int
    number: int
    rows: tuple[RowRange, ...]
    tokens: Path
    """Folder of the token files."""
    out: Path
    itemsize: int
    end_of_document: int
    has_loss_mask: bool

    @property
    def stem(self) -> str:
        """The name of its files, without a suffix."""
        return f"{SPLITS[self.side]}-{self.number:05d}"

    @property
    def names(self) -> dict[str, str]:
        """Its files, by kind."""
        names = {"bin": f"{self.stem}.bin", "docs": f"{self.stem}.docs.u64"}
        return names | ({"mask": f"{self.stem}.loss_mask.u8"} if self.has_loss_mask else {})

    @property
    def file_names(self) -> frozenset[str]:
        """Names of its files."""
        return frozenset(self.names.values())


def order_stage() -> ShuffleStage:
    """Sorts the pieces of all documents."""
    order = ("side", "key", "split", "row", "piece")
    return ShuffleStage("order", order, unchanged, rows_schema(), rows_schema())


def write_stage() -> MapStage:
    """Writes shards."""
    return MapStage("write", write_shard, arrow().schema([("entry", arrow().string())]))


def bound_shards(
    ordered: Sequence[Path], shard_tokens: int
) -> Iterator[tuple[int, int, tuple[RowRange, ...]]]:
    """The side, number and rows of each shard: a new one starts at a document that would exceed the limit.

    The limit counts the first piece of a long document, as the reference does.
    """
    side, number, size = -1, 0, 0
    ranges: list[RowRange] = []
    for path in ordered:
        base = 0
        for batch in read_batches(path):
            columns = [batch.column(name).to_numpy() for name in ("side", "piece", "tokens", "ends")]
            sides, pieces, lengths = columns[0], columns[1], columns[2] + columns[3]
            begin = 0
            while begin < batch.num_rows:
                if sides[begin] != side:
                    if ranges:
                        yield side, number, tuple(ranges)
                    side, number, size, ranges = int(sides[begin]), 0, 0, []
                end = int(np.searchsorted(sides, side, side="right"))
                cut = _first_that_exceeds(pieces[begin:end], lengths[begin:end], size, shard_tokens)
                stop = end if cut is None else begin + cut
                if stop > begin:
                    ranges = _extended(ranges, RowRange(path, base + begin, base + stop))
                    size += int(lengths[begin:stop].sum())
                if cut is not None:
                    yield side, number, tuple(ranges)
                    number, size, ranges = number + 1, 0, []
                begin = stop
            base += batch.num_rows
    if ranges:
        yield side, number, tuple(ranges)


def _first_that_exceeds(pieces: Int64s, lengths: Int64s, size: int, limit: int) -> int | None:
    """The first document, not of an empty shard, whose first piece does not fit."""
    ends = size + np.cumsum(lengths)
    over = (pieces == 0) & (ends > limit)
    if size == 0:
        over[0] = False
    found = np.flatnonzero(over)
    return int(found[0]) if found.size else None


def _extended(ranges: list[RowRange], more: RowRange) -> list[RowRange]:
    if ranges and ranges[-1].path == more.path and ranges[-1].end == more.begin:
        return [*ranges[:-1], RowRange(more.path, ranges[-1].begin, more.end)]
    return [*ranges, more]


def write_shard(task: ShardTask) -> Batches:
    """Write the files of one shard; the row is its entry in the index."""
    digests = {"bin": hashlib.sha256(), "mask": hashlib.sha256(), "docs": hashlib.sha256()}
    tokens, documents = 0, 0
    names = task.names
    with ExitStack() as stack:
        sources = stack.enter_context(_Sources(task))
        files = {kind: stack.enter_context(new_file(task.out / name)) for kind, name in names.items()}
        for block in _blocks(task.rows):
            starts = tokens + block.starts()
            data = {"bin": sources.tokens(block).tobytes(), "docs": starts.astype("<u8").tobytes()}
            if task.has_loss_mask:
                data["mask"] = sources.mask(block).tobytes()
            for kind, file in files.items():
                digests[kind].update(data[kind])
                file.write(data[kind])
            tokens += block.size
            documents += starts.size
    entry = ShardEntry(
        file=names["bin"],
        tokens=tokens,
        sha256=digests["bin"].hexdigest(),
        documents_file=names["docs"],
        documents=documents,
        documents_sha256=digests["docs"].hexdigest(),
        loss_mask_file=names.get("mask"),
        loss_mask_sha256=digests["mask"].hexdigest() if task.has_loss_mask else None,
    )
    yield arrow().RecordBatch.from_pydict({"entry": [json.dumps(asdict(entry))]})


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of a shard."""

    piece: Int64s
    source: Int64s
    offset: Int64s
    tokens: Int64s
    ends: Int64s

    @property
    def size(self) -> int:
        """Tokens, with end-of-document tokens."""
        return int(self.tokens.sum() + self.ends.sum())

    def starts(self) -> Int64s:
        """The first token of each document that starts in the block."""
        lengths = self.tokens + self.ends
        begins: Int64s = (np.cumsum(lengths) - lengths)[self.piece == 0]
        return begins

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Ranges of source files: file, first token, number of tokens. Rows that are adjacent are one."""
        ends = self.offset + self.tokens
        breaks = (self.source[1:] != self.source[:-1]) | (self.offset[1:] != ends[:-1])
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        last = np.concatenate((first[1:], [self.source.size])) - 1
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            yield int(self.source[a]), int(self.offset[a]), int(ends[b] - self.offset[a])

    def end_positions(self) -> Int64s:
        """Where an end-of-document token follows, in tokens without them."""
        positions: Int64s = np.cumsum(self.tokens)[self.ends == 1]
        return positions


def _blocks(ranges: Sequence[RowRange]) -> Iterator[_Block]:
    """The rows of a shard in blocks of about half a million tokens; a long row is cut."""
    names = ("piece", "source", "offset", "tokens", "ends")
    for row_range in ranges:
        at = 0
        for batch in read_batches(row_range.path):
            begin, end = max(row_range.begin - at, 0), min(row_range.end - at, batch.num_rows)
            at += batch.num_rows
            if begin >= end:
                continue
            rows = _cut_long([batch.column(name).to_numpy()[begin:end].astype(np.int64) for name in names])
            group = np.cumsum(rows[3]) // _BLOCK_TOKENS
            bounds = np.concatenate(([0], np.flatnonzero(np.diff(group)) + 1, [group.size])).tolist()
            for a, b in pairwise(bounds):
                yield _Block(*(column[a:b] for column in rows))


def _cut_long(rows: list[Int64s]) -> list[Int64s]:
    """Rows with at most ``_BLOCK_TOKENS`` tokens each; the later parts of a row start no document."""
    piece, source, offset, tokens, ends = rows
    if tokens.size == 0 or tokens.max() <= _BLOCK_TOKENS:
        return rows
    counts = np.maximum(1, -(-tokens // _BLOCK_TOKENS))
    index = np.repeat(np.arange(tokens.size), counts)
    part = np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.minimum(_BLOCK_TOKENS, tokens[index] - part * _BLOCK_TOKENS)
    is_last = part == counts[index] - 1
    pieces = np.where(part == 0, piece[index], 1)
    return [pieces, source[index], offset[index] + part * _BLOCK_TOKENS, sizes, ends[index] * is_last]


class _Sources:
    """Reads token files; a few are open at a time."""

    def __init__(self, task: ShardTask) -> None:
        self._task = task
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def tokens(self, block: _Block) -> npt.NDArray[Any]:
        """The tokens of a block, with end-of-document tokens."""
        task = self._task
        plain = [
            self._read(token_path(task.tokens, source), begin * task.itemsize, count * task.itemsize)
            for source, begin, count in block.runs()
        ]
        tokens = np.frombuffer(b"".join(plain), dtype=f"<u{task.itemsize}")
        return np.insert(tokens, block.end_positions(), task.end_of_document)

    def mask(self, block: _Block) -> npt.NDArray[np.uint8]:
        """The loss mask of a block; an end-of-document token has that of the token before it."""
        task = self._task
        plain = [
            self._read(mask_path(task.tokens, source), begin, count) for source, begin, count in block.runs()
        ]
        mask = np.frombuffer(b"".join(plain), dtype=np.uint8)
        at = block.end_positions()
        return np.insert(mask, at, mask[at - 1])

    def _read(self, path: Path, begin: int, size: int) -> bytes:
        descriptor = self._open.get(path)
        if descriptor is None:
            if len(self._open) >= _FILES_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = self._open[path] = os.open(path, os.O_RDONLY)
        data = os.pread(descriptor, size, begin)
        assert len(data) == size, f"{path} is shorter than its rows say"
        return data
