"""The default engine: processes of this machine run tasks, DuckDB sorts in bounded memory.

If the rows of each input file are in the order of buckets, processes sort the buckets, without DuckDB.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.core.errors import UserError
from meshwright.core.processes import without_main
from meshwright.data.engines.engine import engine_problem
from meshwright.data.engines.stages import BUCKET, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import (
    BATCH_ROWS,
    arrow,
    list_buckets,
    result_path,
    run_bucket,
    run_buckets,
    run_task,
)

SORT_MEMORY_MB = 128
"""DuckDB's limit; it sorts more on disk."""
SORT_THREADS = 4
"""Threads of DuckDB at most: each needs some of its memory."""
SMALL_TASKS = 4
"""Fewer tasks than this run in this process: starting workers takes longer."""
_ATTEMPTS = 4
_ORPHAN_POLL_S = 0.5


_RunOne = Callable[[Path, int, Any, Any], None]
"""Runs the stage on one task, or one bucket, whose number names the result."""


class EmbeddedEngine:
    """Processes and DuckDB. Memory: a worker has one batch, DuckDB 128 MB."""

    name = "embedded"

    def __init__(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self._pool: ProcessPoolExecutor | None = None

    def run_map(self, stage: MapStage, folder: Path, tasks: Sequence[tuple[int, Any]]) -> None:
        """Run tasks in workers; with a parallelism of 1, or very few tasks, in this process."""
        self._run(run_task, stage, folder, tasks)

    def _run(
        self, run: _RunOne, stage: MapStage | ShuffleStage, folder: Path, tasks: Sequence[tuple[int, Any]]
    ) -> None:
        if self.parallelism == 1 or len(tasks) < SMALL_TASKS:
            for number, task in tasks:
                run(folder, number, stage, task)
            return
        left = list(tasks)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._run_in_pool(run, stage, folder, left)
            except BrokenProcessPool:  # a worker was killed, perhaps for its memory: its tasks run again
                self._pool = None
                left = [task for task in left if not result_path(folder, task[0]).exists()]
                if attempt == _ATTEMPTS:
                    raise
            else:
                return

    def _run_in_pool(
        self, run: _RunOne, stage: MapStage | ShuffleStage, folder: Path, tasks: Sequence[tuple[int, Any]]
    ) -> None:
        if self._pool is None:
            # Not forked: a fork copies the locks of the threads of Arrow and of the tokenizers library.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.parallelism, context, initializer=_end_with, initargs=(os.getpid(),)
            )
        with without_main():  # submitting starts workers
            futures = [self._pool.submit(run, folder, number, stage, task) for number, task in tasks]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        try:
            for future in done:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def run_shuffle(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        """Sort each bucket in a worker, or all rows by bucket and order in DuckDB."""
        if stage.bucket_order:
            self._run(run_bucket, stage, folder, [(number, inputs) for number in list_buckets(inputs)])
        else:
            self._sort_all(stage, folder, inputs)

    def _sort_all(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        import duckdb  # noqa: PLC0415 - optional
        import pyarrow.dataset  # noqa: PLC0415

        temporary = folder / "sorting"
        temporary.mkdir(exist_ok=True)
        with _errors_of_sorting(stage.name), duckdb.connect(":memory:") as database:
            database.execute(f"SET memory_limit = '{SORT_MEMORY_MB}MB'")
            database.execute(f"SET threads = {min(self.parallelism, SORT_THREADS)}")
            database.execute("SET temp_directory = ?", [str(temporary)])
            database.execute("SET preserve_insertion_order = false")
            names = [str(path) for path in inputs]
            rows = pyarrow.dataset.dataset(names, schema=stage.schema_in, format="ipc")
            database.register("input_rows", rows)
            columns = ", ".join(f'"{column}"' for column in (BUCKET, *stage.order))
            query = database.sql(f"SELECT * FROM input_rows ORDER BY {columns}")  # noqa: S608
            reader = query.to_arrow_reader(BATCH_ROWS)
            run_buckets(folder, stage, (batch.cast(stage.schema_in) for batch in reader))

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


@contextmanager
def _errors_of_sorting(stage: str) -> Iterator[None]:
    """Raise errors of DuckDB as user errors."""
    import duckdb  # noqa: PLC0415 - optional

    try:
        yield
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise UserError(engine_problem(f"DuckDB cannot sort the rows of {stage}: {reason}")) from error


def _end_with(parent: int) -> None:
    """End this worker when its parent process has ended: a killed driver leaves no process behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_POLL_S)
        os._exit(1)

    arrow().set_cpu_count(1)
    threading.Thread(target=watch, daemon=True).start()
