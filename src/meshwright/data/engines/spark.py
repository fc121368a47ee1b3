"""Spark: DataFrames whose partitions run Python functions on Arrow batches.

Tasks run in the Python workers of executors: meshwright must be installed where they run, and the work folder
must be on a file system that they share. Rows travel in Spark's shuffle. Spark repeats the tasks of a lost
worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.engines.stages import BUCKET, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import arrow, read_batches, run_buckets, run_task

_READERS_PER_CORE = 4


class SparkEngine:
    """A Spark session: local, or of a cluster."""

    name = "spark"

    def __init__(self, parallelism: int, address: str | None = None) -> None:
        """Start a session.

        Args:
            parallelism: Cores of a local session, and partitions of a shuffle.
            address: ``spark://host:7077`` of a cluster; a local session if left out.
        """
        from pyspark.sql import SparkSession  # noqa: PLC0415 - optional

        self.parallelism = parallelism
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.appName("meshwright prepare").master(
            address or f"local[{parallelism}]"
        )
        for key, value in {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": str(parallelism),
            "spark.sql.adaptive.enabled": "false",  # it would merge the partitions of a shuffle
            "spark.task.maxFailures": "4",
        }.items():
            builder = builder.config(key, value)
        self._session: Any = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("ERROR")

    def run_map(self, stage: MapStage, folder: Path, tasks: Sequence[tuple[int, Any]]) -> None:
        """One partition per task."""

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    run_task(folder, tasks[at][0], stage, tasks[at][1])
                yield batch

        self._numbers(len(tasks), len(tasks)).mapInArrow(run, "id long").collect()

    def run_shuffle(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        """Spark's shuffle by bucket, and its sort within partitions."""
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415

        names = stage.schema_in.names

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    yield from (rows.select(names) for rows in read_batches(inputs[at]))

        def write(batches: Iterator[Any]) -> Iterator[Any]:
            found = run_buckets(folder, stage, (batch.cast(stage.schema_in) for batch in batches))
            yield arrow().RecordBatch.from_pydict(
                {BUCKET: found}, arrow().schema([(BUCKET, arrow().int32())])
            )

        readers = min(len(inputs), _READERS_PER_CORE * self.parallelism)
        rows = self._numbers(len(inputs), readers).mapInArrow(read, from_arrow_schema(stage.schema_in))
        grouped = rows.repartition(self.parallelism, BUCKET).sortWithinPartitions(BUCKET, *stage.order)
        grouped.mapInArrow(write, f"{BUCKET} int").collect()

    def _numbers(self, count: int, partitions: int) -> Any:
        return self._session.range(0, count, 1, partitions)

    def close(self) -> None:
        """End the session."""
        self._session.stop()
