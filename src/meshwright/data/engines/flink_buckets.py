"""The function of a shuffle as an operator of Flink. It imports ``pyflink``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyflink.common import Types
from pyflink.datastream import KeyedProcessFunction, RuntimeContext
from pyflink.datastream.state import ListStateDescriptor

from meshwright.data.engines.stages import ShuffleStage
from meshwright.data.engines.work_folder import arrow, run_buckets, sorted_table

_END_OF_TIME = 2**63 - 2


class BucketFunction(KeyedProcessFunction):  # type: ignore[misc]  # pyflink has no types
    """Collects the rows of a bucket, and writes them when no more can come."""

    def __init__(self, stage: ShuffleStage, folder: Path) -> None:
        self._stage, self._folder = stage, folder
        self._rows: Any = None

    def open(self, runtime_context: RuntimeContext) -> None:
        """Get the state of a key."""
        self._rows = runtime_context.get_list_state(ListStateDescriptor("rows", Types.PICKLED_BYTE_ARRAY()))

    def process_element(self, value: tuple[int, bytes], ctx: KeyedProcessFunction.Context) -> None:
        """Keep the rows until the end of the input."""
        self._rows.add(value[1])
        ctx.timer_service().register_event_time_timer(_END_OF_TIME)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[int]:
        """All rows of the bucket are here."""
        yield from write_bucket(self._stage, self._folder, list(self._rows.get()))
        self._rows.clear()


def write_bucket(stage: ShuffleStage, folder: Path, serialized: Sequence[bytes]) -> list[int]:
    """Sort the rows of one bucket and run the function of the stage."""
    pa = arrow()
    batches = [pa.ipc.read_record_batch(pa.py_buffer(data), stage.schema_in) for data in serialized]
    rows = sorted_table(batches, stage.order, stage.schema_in)
    return run_buckets(folder, stage, iter(rows.to_batches()))
