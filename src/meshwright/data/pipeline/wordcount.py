"""Word count, the smallest pipeline: map, combine, shuffle, reduce.

A word is what ``str.split()`` gives, case kept. The map counts the words of one input split: it is the
combiner too, so a frequent word crosses the shuffle once per split, not once per occurrence. The shuffle
brings the counts of a word together; the reduce adds them.
"""

from __future__ import annotations

import heapq
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.data.engines.engine import Engine, Show, map_tasks, shuffle_rows
from meshwright.data.engines.stages import BUCKET, Batches, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import BATCH_ROWS, WorkFolder, arrow, read_batches
from meshwright.data.files import BadDataError, FileKind, file_kind, open_file
from meshwright.data.pipeline.splits import SPLIT_BYTES, FilePart, InputSplit, plan_splits
from meshwright.data.prepare_report import describe_left_out
from meshwright.data.sources import printable
from meshwright.data.splitmix import GOLDEN, Uint64s, mix

TOP = 20
"""Words that are named."""

_BLOCK_BYTES = 4 * 1024**2
_SPACE = 0x20
_TO_SPACE = bytes(_SPACE if chr(code).isspace() and code < 128 else code for code in range(256))
"""The separators of ``str.split()`` in ASCII."""
_WIDE = [chr(code).encode() for code in range(128, 0x10000) if chr(code).isspace()]
"""The separators outside of ASCII, in UTF-8."""
_WIDE_CODES = {
    size: np.asarray([int.from_bytes(one) for one in _WIDE if len(one) == size]) for size in (2, 3)
}
_IS_WIDE_START = np.isin(np.arange(256), [one[0] for one in _WIDE])
_PACKED = 8
"""Bytes of a word that is counted as a number, with the space after it."""


@dataclass(frozen=True)
class WordCount:
    """The result; ``meshwright wordcount --json`` prints it."""

    engine: str
    distinct: int
    """Different words."""
    total: int
    """All words."""
    top: tuple[tuple[str, int], ...]
    """The most frequent words and their counts; words with equal counts in the order of their characters."""
    seconds: float
    splits: int
    """Input splits, each one task of the map."""
    left_out: tuple[str, ...] = ()
    """``name: reason`` of files that are of a kind without lines of text, or cannot be listed."""

    def as_dict(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return asdict(self)

    def describe_left_out(self) -> list[str]:
        """Lines about files that were left out."""
        return describe_left_out(self.left_out, len(self.left_out))


@dataclass(frozen=True)
class CountTask:
    """One split."""

    split: InputSplit
    buckets: int


def _compute() -> Any:
    import pyarrow.compute  # noqa: PLC0415 - optional

    return pyarrow.compute


def counts_schema() -> Any:
    """A word of a split, or of all."""
    pa = arrow()
    kinds = {BUCKET: pa.int32(), "hash": pa.int64(), "split": pa.int32(), "row": pa.int64()}
    return pa.schema([*kinds.items(), ("word", pa.large_string()), ("count", pa.int64())])


def count_stage() -> MapStage:
    """Map and combine."""
    return MapStage("count", count_split, counts_schema())


def sum_stage() -> ShuffleStage:
    """Shuffle and reduce."""
    schema, order = counts_schema(), ("hash", "split", "row")
    return ShuffleStage("sum", order, sum_counts, schema, schema, bucket_order=True)


def count_words(
    sources: Sequence[str],
    base: Path,
    engine: Engine | None,
    top: int = TOP,
    show: Show = lambda name, done: None,
    split_bytes: int = SPLIT_BYTES,
) -> WordCount:
    """Count the words of files.

    Args:
        sources: Files, folders or globs; ``.gz`` and ``.zst`` are decompressed.
        base: Folder of relative sources, and of temporary files; workers must see it.
        engine: Runs the stages; None for one process without stages, the reference.
        top: Words to name.
        show: Called with the stage and its finished tasks.
        split_bytes: Size of an input split.

    Raises:
        UserError: A source is missing, no file has text, or one is damaged.
    """
    started = time.monotonic()
    planned = plan_splits(sources, base, (), split_bytes=split_bytes, cut_text=True)
    splits, left_out = _keep_text(planned)
    if engine is None:
        counts: Counter[str] = Counter()
        for split in splits:
            _count_into(counts, split)
        best = heapq.nsmallest(top, counts.items(), key=lambda entry: (-entry[1], entry[0]))
        took = time.monotonic() - started
        return WordCount("reference", len(counts), counts.total(), tuple(best), took, len(splits), left_out)
    with tempfile.TemporaryDirectory(prefix=".wordcount-", dir=base) as folder:
        work = WorkFolder(Path(folder).absolute())
        buckets = max(4, len(splits) // 4)
        counted = map_tasks(engine, work, count_stage(), [CountTask(s, buckets) for s in splits], show)
        summed = shuffle_rows(engine, work, sum_stage(), counted, show)
        found = _result(engine.name, _rows(summed), top, started, len(splits))
        return replace(found, left_out=left_out)


def _keep_text(planned: Sequence[InputSplit]) -> tuple[list[InputSplit], tuple[str, ...]]:
    """The splits without files that have no lines of text, and the names of these files.

    Raises:
        UserError: No file is left; with the reason of the first.
    """
    errors: list[tuple[str, BadDataError]] = []
    splits = []
    for split in planned:
        kept = []
        for part in split.parts:
            try:
                _text_kind(part)
            except BadDataError as refusal:
                errors.append((printable(part.name), refusal))
            else:
                kept.append(part)
        if kept:
            splits.append(replace(split, parts=tuple(kept)))
    if errors and not splits:
        name, error = errors[0]
        raise UserError(Problem(error.code, f"cannot be counted: {error}", path=name, fix=error.fix))
    return splits, tuple(f"{name}: {why}" for name, why in errors)


def _text_kind(part: FilePart) -> FileKind:
    """The kind of a file with lines of text.

    Raises:
        BadDataError: It has none, or cannot be listed.
    """
    if part.unreadable is not None:
        raise BadDataError("data-path-unreadable", part.unreadable)
    kind = file_kind(part.path)
    if kind.kind == "parquet":
        raise BadDataError("data-file-kind", "a Parquet file has no lines", "Convert it to text")
    return kind


def _result(engine: str, counts: Iterable[Any], top: int, started: float, splits: int) -> WordCount:
    """The answer from batches of words, each with all its counts summed."""
    distinct = total = least = 0
    best: list[tuple[str, int]] = []
    for batch in counts:
        values = batch.column("count").to_numpy()
        distinct, total = distinct + values.size, total + int(values.sum())
        words = batch.column("word")
        best += [(words[at].as_py(), int(values[at])) for at in np.flatnonzero(values >= least).tolist()]
        if len(best) > top:
            best = heapq.nsmallest(top, best, key=lambda entry: (-entry[1], entry[0]))
            least = best[-1][1] if best else 0
    best.sort(key=lambda entry: (-entry[1], entry[0]))
    return WordCount(engine, distinct, total, tuple(best), time.monotonic() - started, splits)


def _rows(paths: Sequence[Path]) -> Iterator[Any]:
    for path in paths:
        yield from read_batches(path)


def count_split(task: CountTask) -> Batches:
    """The words of a split and their counts."""
    pa, schema = arrow(), counts_schema()
    short: list[Uint64s] = [np.empty(0, dtype=np.uint64)]
    long: list[Any] = []
    for part in task.split.parts:
        for block in _blocks(part):
            packed, words = split_block(block)
            short.append(packed)
            long.append(words)
    counted = pa.chunked_array(long, pa.large_string()).value_counts()
    words = _compute().utf8_rtrim(counted.field("values"), characters=" ")
    long_counts = pa.table({"word": words, "count": counted.field("counts")})
    counts = pa.concat_tables([count_short(np.concatenate(short)), long_counts])
    words = pa.concat_arrays(counts.column("word").chunks)
    hashes = hash_words(words)
    by_bucket = np.argsort(hashes % task.buckets, kind="stable")
    columns = {
        BUCKET: (hashes % task.buckets).astype(np.int32),
        "hash": hashes,
        "split": np.full(hashes.size, task.split.number, dtype=np.int32),
        "row": np.arange(hashes.size),
        "word": words,
        "count": counts.column("count"),
    }
    yield from pa.table(columns, schema).take(by_bucket).to_batches(BATCH_ROWS)


def sum_counts(batches: Batches) -> Batches:
    """One row per word. Counts of a word are adjacent; two words with equal hashes may be mixed."""
    pa, schema = arrow(), counts_schema()
    pending: list[Any] = []
    for batch in batches:
        hashes = batch.column("hash").to_numpy()
        cut = int(np.searchsorted(hashes, hashes[-1])) if hashes.size else 0  # the last group may go on
        pending.append(batch.slice(0, cut))
        if cut and sum(one.num_rows for one in pending) >= BATCH_ROWS:
            yield from _summed(pa.Table.from_batches(pending, schema))
            pending = []
        pending.append(batch.slice(cut))
    yield from _summed(pa.Table.from_batches(pending, schema))


def _summed(table: Any) -> Batches:
    pa, schema = arrow(), counts_schema()
    table = table.combine_chunks()
    hashes, words = (table.column(name) for name in ("hash", "word"))
    is_first = np.concatenate(([True], np.diff(hashes.to_numpy()) != 0))[: table.num_rows]
    same = _compute().equal(words.slice(1), words.slice(0, max(0, table.num_rows - 1))).to_numpy()
    if (is_first[1:] | same).all():
        first = np.flatnonzero(is_first)
        sums = np.add.reduceat(table.column("count").to_numpy(), first) if first.size else first
        counts = pa.table({"word": words.take(pa.array(first)), "count": sums})
    else:  # two words with equal hashes
        summed = table.group_by("word", use_threads=False).aggregate([("count", "sum")])
        counts = summed.select(["word", "count_sum"]).rename_columns(["word", "count"])
    zeros = np.zeros(counts.num_rows, dtype=np.int64)
    columns = {BUCKET: zeros.astype(np.int32), "hash": zeros, "split": zeros.astype(np.int32), "row": zeros}
    columns |= {name: counts.column(name) for name in ("word", "count")}
    yield from pa.table(columns, schema).to_batches(BATCH_ROWS)


def split_block(block: bytes) -> tuple[Uint64s, Any]:
    """The short and the long words of a text in UTF-8, one by one.

    Every separator becomes a space, and a word keeps the space after it. So a word of up to 7 bytes is one
    number, and the others are slices of the text.
    """
    pa = arrow()
    if not block.isascii():
        try:
            block.decode("utf-8")
        except UnicodeDecodeError:
            block = block.decode("utf-8", "replace").encode("utf-8")
    text = bytearray().join((block.translate(_TO_SPACE), b" ", bytes(_PACKED)))
    data = np.frombuffer(text, dtype=np.uint8)
    if not block.isascii():
        _clear_wide_spaces(data)
    ends = np.flatnonzero(data == _SPACE) + 1
    starts = np.concatenate(([0], ends[:-1]))
    sizes = ends - starts
    is_short = (sizes > 1) & (sizes <= _PACKED)
    windows = np.ndarray((len(text) - _PACKED,), dtype="<u8", buffer=text, strides=(1,))
    unused = (8 * (_PACKED - sizes[is_short])).astype(np.uint64)
    packed = (windows[starts[is_short]] << unused) >> unused
    offsets = np.concatenate(([0], ends)).astype(np.int64)
    words = pa.LargeStringArray.from_buffers(ends.size, pa.py_buffer(offsets), pa.py_buffer(text))
    return packed, words.filter(pa.array(sizes > _PACKED))


def _clear_wide_spaces(data: npt.NDArray[np.uint8]) -> None:
    """Overwrite separators of two and three bytes with spaces; zeros follow the text."""
    starts = np.flatnonzero(_IS_WIDE_START[data])
    codes = data[starts].astype(np.int64)
    for size in (2, 3):
        codes = (codes << 8) | data[starts + size - 1]
        found = starts[np.isin(codes, _WIDE_CODES[size])]
        data[(found[:, None] + np.arange(size)).reshape(-1)] = _SPACE


def count_short(packed: Uint64s) -> Any:
    """Words of up to 7 bytes and their counts, in the order of their numbers."""
    pa = arrow()
    packed = np.sort(packed)
    first = (
        np.flatnonzero(np.concatenate(([True], packed[1:] != packed[:-1]))) if packed.size else np.arange(0)
    )
    letters = packed[first].astype("<u8").view(np.uint8).reshape(-1, _PACKED)
    sizes = (letters == _SPACE).argmax(axis=1)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    text = letters[np.arange(_PACKED) < sizes[:, None]].tobytes()
    words = pa.LargeStringArray.from_buffers(sizes.size, pa.py_buffer(offsets), pa.py_buffer(text))
    return pa.table({"word": words, "count": np.diff(first, append=packed.size)})


def hash_words(words: Any) -> npt.NDArray[np.int64]:
    """A hash of each word, from its UTF-8 bytes eight at a time."""
    offsets = np.frombuffer(words.buffers()[1], dtype=np.int64)[words.offset : words.offset + len(words) + 1]
    starts, sizes = offsets[:-1], np.diff(offsets)
    data = np.concatenate((np.frombuffer(words.buffers()[2], dtype=np.uint8), np.zeros(8, dtype=np.uint8)))
    hashes = mix(sizes.astype(np.uint64) + GOLDEN)
    left = np.arange(sizes.size)
    at = 0
    while (left := left[sizes[left] > at]).size:
        windows = data[starts[left, None] + at + np.arange(8)]
        windows[np.arange(8) >= (sizes[left] - at)[:, None]] = 0
        hashes[left] = mix(hashes[left] ^ (windows.view("<u8")[:, 0] + GOLDEN))
        at += 8
    return hashes.view(np.int64)


def _count_into(counts: Counter[str], split: InputSplit) -> None:
    for part in split.parts:
        for block in _blocks(part):
            counts.update(block.decode("utf-8", "replace").split())


def _blocks(part: FilePart) -> Iterator[bytes]:
    """The lines that start in a part, in blocks that end with a line.

    Raises:
        UserError: The file is of a kind without text, or damaged.
    """
    try:
        kind = _text_kind(part)
        begin, end = part.part or (0, 2**63)
        with open_file(part.path, kind.compression) as (stream, _):
            if begin > 0:
                stream.seek(begin - 1)
                begin += len(stream.readline()) - 1
            while begin < end and (block := stream.read(min(_BLOCK_BYTES, end - begin))):
                block += b"" if block.endswith(b"\n") else stream.readline()
                begin += len(block)
                yield block
    except (BadDataError, OSError) as error:
        code = error.code if isinstance(error, BadDataError) else "data-path-unreadable"
        fix = error.fix if isinstance(error, BadDataError) else ""
        problem = Problem(code, f"cannot be counted: {error}", path=printable(part.name), fix=fix)
        raise UserError(problem) from error
