"""Ray Data: blocks run Python functions on Arrow tables; a group-by brings the rows of a bucket together.

The rows of one bucket are sorted in memory. Workers need meshwright and a file system that they share.
Ray runs the tasks of a lost worker again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.engines.stages import BUCKET, MapStage, ShuffleStage
from meshwright.data.engines.work_folder import arrow, read_batches, run_buckets, run_task, sorted_table


class RayEngine:
    """A Ray cluster: of this process, or one that runs."""

    name = "ray"

    def __init__(self, parallelism: int, address: str | None = None) -> None:
        """Start or join a cluster.

        Args:
            parallelism: Cores of a local cluster, and tasks at once.
            address: ``host:port`` of a cluster; a local one if left out.
        """
        import ray  # noqa: PLC0415 - optional
        import ray.data  # noqa: PLC0415

        self.parallelism = parallelism
        self._ray: Any = ray
        if address is None and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            # Without one, Ray writes a token into the home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        settings = {"num_cpus": parallelism} if address is None else {"address": address}
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **settings)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.verbose_stats_logs = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def run_map(self, stage: MapStage, folder: Path, tasks: Sequence[tuple[int, Any]]) -> None:
        """One block per task."""

        def run(table: Any) -> Any:
            for at in table.column("id").to_pylist():
                run_task(folder, tasks[at][0], stage, tasks[at][1])
            return table

        self._numbers(len(tasks)).map_batches(run, batch_format="pyarrow", batch_size=None).materialize()

    def run_shuffle(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        """Ray's group-by, and a sort of each bucket."""
        names = stage.schema_in.names

        def read(table: Any) -> Iterator[Any]:
            pa = arrow()
            for at in table.column("id").to_pylist():
                for batch in read_batches(inputs[at]):
                    yield pa.Table.from_batches([batch.select(names)])

        def write(table: Any) -> Any:
            rows = sorted_table(table.cast(stage.schema_in).to_batches(), stage.order, stage.schema_in)
            return arrow().table({BUCKET: run_buckets(folder, stage, iter(rows.to_batches()))})

        rows = self._numbers(len(inputs)).map_batches(read, batch_format="pyarrow", batch_size=None)
        # By default 200 partitions, each a task.
        rows.groupby(BUCKET, self.parallelism).map_groups(write, batch_format="pyarrow").materialize()

    def _numbers(self, count: int) -> Any:
        return self._ray.data.range(count, override_num_blocks=count)

    def close(self) -> None:
        """Leave the cluster; a local one ends."""
        self._ray.shutdown()
