"""Word count, the smallest pipeline: map, combine, shuffle, reduce.

A word is what ``str.split()`` gives, case kept. The map counts the words of one input split: it is the
combiner too, so a frequent word crosses the shuffle once per split, not once per occurrence. The shuffle
brings the counts of a word together; the reduce adds them.
"""

from __future__ import annotations

import hashlib
import heapq
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.data.engines.engine import Engine, Show, map_tasks, shuffle_rows
from meshwright.data.engines.stages import BUCKET, Batches, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import BATCH_ROWS, WorkFolder, arrow, read_batches
from meshwright.data.files import BadDataError, file_kind, open_file
from meshwright.data.pipeline.splits import SPLIT_BYTES, FilePart, InputSplit, plan_splits
from meshwright.data.sources import printable

TOP = 20
"""Words that are named."""

_BLOCK_BYTES = 4 * 1024**2


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

    def as_dict(self) -> dict[str, Any]:
        """The result for ``--json``."""
        return asdict(self)


@dataclass(frozen=True)
class CountTask:
    """One split."""

    split: InputSplit
    buckets: int


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
    return ShuffleStage("sum", ("hash", "split", "row"), sum_counts, counts_schema(), counts_schema())


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
        UserError: A source is missing, or a file has no text.
    """
    started = time.monotonic()
    splits = plan_splits(sources, base, (), split_bytes=split_bytes, cut_text=True)
    if engine is None:
        counts: Counter[str] = Counter()
        for split in splits:
            _count_into(counts, split)
        rows: Iterator[tuple[str, int]] = iter(counts.items())
        return _result("reference", rows, top, started, len(splits))
    with tempfile.TemporaryDirectory(prefix=".wordcount-", dir=base) as folder:
        work = WorkFolder(Path(folder).absolute())
        buckets = max(4, len(splits) // 4)
        counted = map_tasks(engine, work, count_stage(), [CountTask(s, buckets) for s in splits], show)
        summed = shuffle_rows(engine, work, sum_stage(), counted, show)
        return _result(engine.name, _rows(summed), top, started, len(splits))


def _result(engine: str, rows: Iterator[tuple[str, int]], top: int, started: float, splits: int) -> WordCount:
    distinct = total = 0
    best: list[tuple[str, int]] = []
    for word, count in rows:
        distinct, total = distinct + 1, total + count
        best.append((word, count))
        if len(best) > max(1000, 10 * top):
            best = _most(best, top)
    return WordCount(engine, distinct, total, tuple(_most(best, top)), time.monotonic() - started, splits)


def _most(words: list[tuple[str, int]], top: int) -> list[tuple[str, int]]:
    return heapq.nsmallest(top, words, key=lambda entry: (-entry[1], entry[0]))


def _rows(paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    for path in paths:
        for batch in read_batches(path):
            yield from zip(batch.column("word").to_pylist(), batch.column("count").to_pylist(), strict=True)


def count_split(task: CountTask) -> Batches:
    """The words of a split and their counts."""
    pa, schema = arrow(), counts_schema()
    counts: Counter[str] = Counter()
    _count_into(counts, task.split)
    words = list(counts)
    for begin in range(0, len(words), BATCH_ROWS):
        part = words[begin : begin + BATCH_ROWS]
        hashes = [_hash(word) for word in part]
        columns = {
            BUCKET: [value % task.buckets for value in hashes],
            "hash": hashes,
            "split": [task.split.number] * len(part),
            "row": range(begin, begin + len(part)),
            "word": part,
            "count": [counts[word] for word in part],
        }
        yield pa.RecordBatch.from_pydict(columns, schema)


def sum_counts(batches: Batches) -> Batches:
    """One row per word: the counts of equal words are adjacent, but for words with equal hashes."""
    pa, schema = arrow(), counts_schema()
    group: dict[str, int] = {}
    current: int | None = None
    done: list[tuple[str, int]] = []
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in ("hash", "word", "count")]
        for hashed, word, count in zip(*columns, strict=True):
            if hashed != current:
                done += group.items()
                group, current = {}, hashed
            group[word] = group.get(word, 0) + count
        if len(done) >= BATCH_ROWS:
            yield _batch(pa, schema, done)
            done = []
    done += group.items()
    if done:
        yield _batch(pa, schema, done)


def _batch(pa: Any, schema: Any, words: list[tuple[str, int]]) -> Any:
    columns: dict[str, list[Any]] = dict.fromkeys((BUCKET, "hash", "split", "row"), [0] * len(words))
    columns |= {"word": [word for word, _ in words], "count": [count for _, count in words]}
    return pa.RecordBatch.from_pydict(columns, schema)


def _hash(word: str) -> int:
    hashed = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def _count_into(counts: Counter[str], split: InputSplit) -> None:
    for part in split.parts:
        for text in _texts(part):
            counts.update(text.split())


def _texts(part: FilePart) -> Iterator[str]:
    """The lines that start in a part, in blocks that end with a line; broken UTF-8 is replaced.

    Raises:
        UserError: The file is of a kind without text, or damaged.
    """
    try:
        if part.unreadable is not None:
            raise BadDataError("data-path-unreadable", part.unreadable)
        kind = file_kind(part.path)
        if kind.kind == "parquet":
            raise BadDataError("data-file-kind", "a Parquet file has no lines", "Convert it to text")
        begin, end = part.part or (0, 2**63)
        with open_file(part.path, kind.compression) as (stream, _):
            if begin > 0:
                stream.seek(begin - 1)
                begin += len(stream.readline()) - 1
            while begin < end and (block := stream.read(min(_BLOCK_BYTES, end - begin))):
                block += b"" if block.endswith(b"\n") else stream.readline()
                begin += len(block)
                yield block.decode("utf-8", "replace")
    except (BadDataError, OSError) as error:
        code = error.code if isinstance(error, BadDataError) else "data-path-unreadable"
        fix = error.fix if isinstance(error, BadDataError) else ""
        problem = Problem(code, f"cannot be counted: {error}", path=printable(part.name), fix=fix)
        raise UserError(problem) from error
