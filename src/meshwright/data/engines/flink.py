"""Flink: a bounded DataStream job per stage; rows of a bucket are collected in the state of its key.

PyFlink pins NumPy, PyArrow and Py4J, so it has an environment of its own: ``make setup-flink``.
Flink restarts the tasks of a lost task manager. A task that runs again finds the results of those that were
complete, and writes the same bytes for the others: every record counts exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshwright.data.engines.stages import MapStage, ShuffleStage
from meshwright.data.engines.work_folder import arrow, read_batches, run_task

_RESTARTS = 10
_REST_PORT = 8081


class FlinkEngine:
    """A Flink cluster: in this process, or one that runs."""

    name = "flink"

    def __init__(self, parallelism: int, address: str | None = None) -> None:
        """Check the environment.

        Args:
            parallelism: Parallelism of every job.
            address: ``host:8081``, the REST address of a cluster; a mini-cluster if left out.
        """
        self.parallelism, self._address = parallelism, address

    def run_map(self, stage: MapStage, folder: Path, tasks: Sequence[tuple[int, Any]]) -> None:
        """A stream of task numbers, and a map."""
        from pyflink.common import Types  # noqa: PLC0415 - optional

        def run(at: int) -> int:
            run_task(folder, tasks[at][0], stage, tasks[at][1])
            return at

        environment = self._environment()
        numbers = environment.from_collection(list(range(len(tasks))), Types.LONG())
        numbers.rebalance().map(run, Types.LONG()).sink_to(_discard())
        environment.execute(f"meshwright {stage.name}")

    def run_shuffle(self, stage: ShuffleStage, folder: Path, inputs: Sequence[Path]) -> None:
        """Rows by bucket as keyed state; the bucket is sorted and written when the input has ended."""
        from pyflink.common import Types  # noqa: PLC0415

        from meshwright.data.engines.flink_buckets import BucketFunction  # noqa: PLC0415

        names = stage.schema_in.names

        def read(at: int) -> Iterator[tuple[int, bytes]]:
            pa = arrow()
            for batch in read_batches(inputs[at]):
                buckets = batch.column("bucket").to_numpy()
                for bucket in sorted(set(buckets.tolist())):
                    rows = batch.select(names).filter(pa.array(buckets == bucket))
                    yield bucket, rows.serialize().to_pybytes()

        environment = self._environment()
        numbers = environment.from_collection(list(range(len(inputs))), Types.LONG())
        rows = numbers.rebalance().flat_map(read, Types.TUPLE([Types.INT(), Types.PICKLED_BYTE_ARRAY()]))
        grouped = rows.key_by(lambda row: row[0], Types.INT())
        grouped.process(BucketFunction(stage, folder), Types.INT()).sink_to(_discard())
        environment.execute(f"meshwright {stage.name}")

    def _environment(self) -> Any:
        from pyflink.common import Configuration  # noqa: PLC0415
        from pyflink.datastream import RuntimeExecutionMode, StreamExecutionEnvironment  # noqa: PLC0415

        settings = Configuration()
        settings.set_string("restart-strategy.type", "fixed-delay")
        settings.set_string("restart-strategy.fixed-delay.attempts", str(_RESTARTS))
        settings.set_string("restart-strategy.fixed-delay.delay", "1 s")
        if self._address is None:
            environment: Any = StreamExecutionEnvironment.get_execution_environment(settings)
        else:
            environment = StreamExecutionEnvironment(_remote(self._address, settings))
        # Not BATCH: there, Python timers fire before all rows of a key have come.
        environment.set_runtime_mode(RuntimeExecutionMode.STREAMING)
        environment.set_parallelism(self.parallelism)
        environment.set_python_executable(sys.executable)
        return environment

    def close(self) -> None:
        """Nothing runs between two jobs."""


def _remote(address: str, settings: Any) -> Any:
    """A Java environment that sends its jobs to a cluster, with the jar that runs Python there."""
    import pyflink  # noqa: PLC0415
    from pyflink.java_gateway import get_gateway  # noqa: PLC0415
    from pyflink.util.java_utils import to_jarray  # noqa: PLC0415

    place = urlsplit(f"//{address}")
    gateway = get_gateway()
    jars = [str(path) for path in (Path(pyflink.__file__).parent / "opt").glob("flink-python*.jar")]
    environments = gateway.jvm.org.apache.flink.streaming.api.environment.StreamExecutionEnvironment
    return environments.createRemoteEnvironment(
        place.hostname or "localhost",
        place.port or _REST_PORT,
        settings._j_configuration,
        to_jarray(gateway.jvm.String, jars),
    )


def _discard() -> Any:
    """A sink for rows that say only that a task is done."""
    from pyflink.datastream.connectors.base import Sink  # noqa: PLC0415
    from pyflink.java_gateway import get_gateway  # noqa: PLC0415

    sinks = get_gateway().jvm.org.apache.flink.streaming.api.functions.sink.v2
    return Sink(sinks.DiscardingSink())
