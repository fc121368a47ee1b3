"""The results of tasks as files: a preparation that was killed does not repeat finished tasks.

::

    .prepared.3f2a….work/
      lock
      journal.jsonl          a line for each finished stage and run, for people
      scan/00000.arrow       the result of one task
      duplicates/00003.arrow the result of one bucket
      duplicates/done        all buckets are there
      shards/train-00000.bin

A file has its name only when it is complete and on disk. A task that an engine repeats writes the
same bytes. The folder must be on a file system that all workers see, as ``out`` must.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import sync_path
from meshwright.data.engines.stages import BUCKET, Batches, MapStage, ShuffleStage

RESULT = ".arrow"
TRASH = ".trash"
"""The end of the name of a folder that is being removed."""
_DONE = "done"
_MISTAKE = ".mistake.json"
BATCH_ROWS = 16 * 1024


def arrow() -> Any:
    """PyArrow with its file format; ``choose`` has checked that it is installed.

    Its own allocator keeps most of the memory that rows have had. So it uses malloc if it is first imported
    here, and the environment names no allocator.
    """
    if "pyarrow" not in sys.modules:
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    import pyarrow  # noqa: PLC0415 - optional
    import pyarrow.ipc  # noqa: PLC0415

    return pyarrow


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name, on disk, when the block ends without an error."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb", buffering=1024**2) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def write_batches(path: Path, schema: Any, batches: Iterable[Any]) -> int:
    """Write batches to a file; the number of rows."""
    rows = 0
    with new_file(path) as file, arrow().ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def read_batches(path: Path) -> Batches:
    """The batches of a file, one in memory at a time."""
    with path.open("rb") as file, arrow().ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def count_rows(path: Path) -> int:
    """Rows of a file."""
    return sum(batch.num_rows for batch in _map_batches(path))


def run_task(folder: Path, number: int, stage: MapStage, task: Any) -> None:
    """Run one task, unless its result is there.

    A mistake of the user is also written to a file: engines wrap the exceptions of tasks in their own.
    """
    path = result_path(folder, number)
    if path.exists():
        return
    try:
        write_batches(path, stage.schema, stage.function(task))
    except UserError as error:
        problems = json.dumps([asdict(problem) for problem in error.problems])
        with new_file(folder / f"{number:05d}{_MISTAKE}") as file:
            file.write(problems.encode())
        raise


@contextmanager
def mistakes_of_tasks(folder: Path) -> Iterator[None]:
    """Raise the mistake of a task as it was, not as the engine reports it."""
    for old in folder.glob(f"*{_MISTAKE}"):
        old.unlink()
    try:
        yield
    except Exception as error:
        for path in sorted(folder.glob(f"*{_MISTAKE}")):
            raise UserError(*map(Problem.from_dict, json.loads(path.read_bytes()))) from error
        raise


def run_buckets(folder: Path, stage: ShuffleStage, batches: Batches) -> list[int]:
    """Run the function of a shuffle on sorted rows of one or more buckets; the buckets that were found."""
    found = []
    for bucket, rows in _by_bucket(batches):
        write_batches(result_path(folder, bucket), stage.schema, stage.function(rows))
        found.append(bucket)
    return found


def run_bucket(folder: Path, bucket: int, stage: ShuffleStage, inputs: Sequence[Path]) -> None:
    """Run the function of a shuffle on one bucket of files whose rows are in the order of buckets."""
    rows = (piece for path in inputs for piece in _read_bucket(path, bucket))
    run_buckets(folder, stage, iter(sorted_table(rows, stage.order, stage.schema_in).to_batches(BATCH_ROWS)))


def _read_bucket(path: Path, bucket: int) -> Batches:
    """The rows of one bucket in a file whose rows are in the order of buckets; others are not read."""
    for batch in _map_batches(path):
        buckets = batch.column(BUCKET).to_numpy()
        begin, end = buckets.searchsorted(bucket), buckets.searchsorted(bucket, side="right")
        if begin < end:
            yield batch.slice(begin, end - begin)


def list_buckets(inputs: Sequence[Path]) -> list[int]:
    """The buckets of files, in order; other columns are not read."""
    columns = (batch.column(BUCKET) for path in inputs for batch in _map_batches(path))
    return sorted({bucket for column in columns for bucket in column.unique().to_pylist()})


def _map_batches(path: Path) -> Batches:
    """The batches of a file, mapped: only what is used of them is read."""
    with arrow().memory_map(str(path)) as file, arrow().ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def result_path(folder: Path, number: int) -> Path:
    """The file of a task or a bucket."""
    return folder / f"{number:05d}{RESULT}"


def _by_bucket(batches: Batches) -> Iterator[tuple[int, Batches]]:
    """Split sorted batches where the bucket changes."""
    pieces = _bucket_pieces(batches)
    pending = next(pieces, None)
    while pending is not None:
        bucket = pending[0]
        upcoming: list[tuple[int, Any] | None] = [pending]

        def rows(bucket: int = bucket, upcoming: list[tuple[int, Any] | None] = upcoming) -> Batches:
            while (piece := upcoming[0]) is not None and piece[0] == bucket:
                upcoming[0] = next(pieces, None)
                yield piece[1]

        group = rows()
        yield bucket, group
        for _ in group:  # what the function did not read
            pass
        pending = upcoming[0]


def _bucket_pieces(batches: Batches) -> Iterator[tuple[int, Any]]:
    for batch in batches:
        buckets = batch.column(BUCKET).to_numpy()
        begin = 0
        while begin < batch.num_rows:
            end = int(buckets.searchsorted(buckets[begin], side="right"))
            yield int(buckets[begin]), batch.slice(begin, end - begin)
            begin = end


def sorted_table(batches: Iterable[Any], order: tuple[str, ...], schema: Any) -> Any:
    """Rows of one bucket, sorted in memory."""
    table = arrow().Table.from_batches(list(batches), schema)
    return table.sort_by([(column, "ascending") for column in (BUCKET, *order)])


class WorkFolder:
    """The folder of one preparation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; it is removed only by :meth:`remove`.

        Raises:
            UserError: Another process prepares the same data.
        """
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_own(lock):
                    raise BlockingIOError(errno.EAGAIN, "the folder was removed by the process that held it")
            except BlockingIOError as error:
                raise UserError(
                    Problem(
                        "data-prepare-running",
                        "is being prepared by another process",
                        path=str(self.path),
                        fix="Wait for it, or stop it: the next run goes on where it was",
                    )
                ) from error
            for draft in self.path.rglob(".*.part"):  # of workers that were killed
                draft.unlink(missing_ok=True)
            yield

    def _open_lock(self) -> IO[bytes]:
        self.path.mkdir(parents=True, exist_ok=True)
        return (self.path / "lock").open("ab")

    def _is_own(self, lock: IO[bytes]) -> bool:
        """Whether the lock is still the one of this folder."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), (self.path / "lock").stat())
        except FileNotFoundError:
            return False

    def stage(self, name: str) -> Path:
        """The folder of a stage."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def missing(self, name: str, count: int) -> list[int]:
        """The tasks of a stage that have no result."""
        done = {path.name for path in self.stage(name).iterdir()}
        return [number for number in range(count) if f"{number:05d}{RESULT}" not in done]

    def is_done(self, name: str) -> bool:
        """Whether a shuffle is complete."""
        return (self.path / name / _DONE).exists()

    def restart(self, name: str) -> Path:
        """An empty folder for a shuffle that was not complete."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        return self.stage(name)

    def mark_done(self, name: str) -> None:
        """A shuffle is complete."""
        sync_path(self.path / name)
        with new_file(self.path / name / _DONE):
            pass

    def results(self, name: str) -> list[Path]:
        """The files of a stage, by number."""
        return sorted((self.path / name).glob(f"[0-9]*{RESULT}"), key=lambda path: int(path.stem))

    def note(self, **facts: object) -> None:
        """Append a line to the journal."""
        with (self.path / "journal.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(json.dumps({"time": time.time(), **facts}) + "\n")

    def forget(self, name: str, number: int) -> None:
        """Remove the result of a task, so that it runs again."""
        result_path(self.path / name, number).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; the caller holds it.

        It loses its name first: a kill in between leaves no folder in which some results are missing.
        """
        trash = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}{TRASH}")
        with suppress(OSError):
            self.path.rename(trash)
            sync_path(trash.parent)
        shutil.rmtree(trash, ignore_errors=True)


def remove_other_folders(work: Path, target: Path) -> None:
    """Remove what is left of preparations of other data into ``target``, and of removed folders.

    Args:
        work: The folder that is in use.
        target: Output folder of the preparation; folders of other targets stay, also if their names begin
            alike.
    """
    name = re.compile(re.escape(f".{target.name}") + r"\.[0-9a-f]{16}\.work(\.[0-9a-f]{8}\.trash)?")
    for other in target.parent.iterdir():
        match = name.fullmatch(other.name)
        if match is None or other == work:
            continue
        if match[1]:
            shutil.rmtree(other, ignore_errors=True)
            continue
        folder = WorkFolder(other)
        with suppress(OSError, UserError), folder.locked():  # it may be in use
            folder.remove()
