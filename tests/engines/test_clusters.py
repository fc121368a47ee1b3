"""Real clusters: workers are killed with -9 in the middle, and the output is the same to the byte."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import closing

import pytest
from clusters import flink_cluster, spark_cluster

from golden_corpus import CORPUS, SHA256, SPLIT_BYTES
from meshwright.data.corpus_spec import parse_corpus_spec
from meshwright.data.engines.choose import build_engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


def slow_stage(folder, count: int):
    """Tasks that take long enough for a kill in the middle; each attempt leaves a file."""
    import pyarrow as pa

    from meshwright.data.engines.stages import MapStage

    schema = pa.schema([("bucket", pa.int32()), ("value", pa.int64())])

    def emit(task):
        number, attempts = task
        (attempts / f"{number}-{os.getsid(0)}-{time.time_ns()}").touch()
        time.sleep(2.0)
        values = list(range(100 * number, 100 * (number + 1)))
        yield pa.RecordBatch.from_pydict({"bucket": [v % 7 for v in values], "value": values}, schema)

    def keep(batches):
        return batches

    attempts = folder / "attempts"
    attempts.mkdir()
    from meshwright.data.engines.stages import ShuffleStage

    tasks = [(number, attempts) for number in range(count)]
    return MapStage("emit", emit, schema), tasks, ShuffleStage("sort", ("value",), keep, schema, schema)


def run_killed(engine, folder, cluster) -> int:
    """Run the slow stages; a worker is killed in the middle of a task. The number of attempts."""
    from meshwright.data.engines.engine import map_tasks, shuffle_rows
    from meshwright.data.engines.work_folder import WorkFolder, read_batches

    work = WorkFolder(folder / "work")
    work.path.mkdir()
    stage, tasks, sort = slow_stage(folder, 16)
    killed = threading.Event()

    def on_progress(name: str, done: int) -> None:
        if name != "emit" or killed.is_set() or not 0 < done < len(tasks) - 2:
            return
        finished = {int(path.stem) for path in work.results("emit")}
        attempts = [path.name.split("-") for path in (folder / "attempts").iterdir()]
        if cluster.kill_busy(
            {int(session) for number, session, _ in attempts if int(number) not in finished}
        ):
            killed.set()

    results = map_tasks(engine, work, stage, tasks, on_progress)
    ordered = shuffle_rows(engine, work, sort, results, lambda *_: None)
    assert killed.is_set()
    values = [v for path in ordered for b in read_batches(path) for v in b.column("value").to_pylist()]
    counts = Counter(values)
    lost = set(range(1600)) - set(counts)
    duplicated = [value for value, count in counts.items() if count > 1]
    assert (len(lost), len(duplicated)) == (0, 0)
    return len(list((folder / "attempts").iterdir()))


def prepare_killed(engine, folder, corpus, cluster, prefix: str) -> None:
    """Prepare the golden corpus; a worker is killed while documents are tokenized."""
    from meshwright.data.pipeline.run import prepare_on_engine

    killed = threading.Event()

    def on_progress(stage: str, share: float, documents: int) -> None:
        if stage == "tokenize" and not killed.is_set():
            killed.set()
            cluster.kill_any(prefix)

    spec = parse_corpus_spec({**CORPUS, "out": str(folder / "out")})
    report = prepare_on_engine(spec, corpus, engine, on_progress, SPLIT_BYTES)
    assert killed.is_set()
    assert report.sha256 == SHA256


def test_killed_spark_workers_change_nothing(needs, corpus, tmp_path):
    """A master and three workers; one with its executor is killed during a map, one in a preparation."""
    needs("spark")

    with (
        spark_cluster(tmp_path) as (cluster, address),
        closing(build_engine("spark", 2, address)) as engine,
    ):
        attempts = run_killed(engine, tmp_path, cluster)
        assert attempts > 16, "no task ran again"
        prepare_killed(engine, tmp_path, corpus, cluster, "worker")


def test_killed_flink_task_managers_lose_and_double_nothing(needs, corpus, tmp_path):
    """A job manager and three task managers; one is killed during a map: 0 lost, 0 duplicated; one later."""
    needs("flink")

    with (
        flink_cluster(tmp_path) as (cluster, address),
        closing(build_engine("flink", 2, address)) as engine,
    ):
        attempts = run_killed(engine, tmp_path, cluster)
        assert attempts > 16, "no task ran again"
        prepare_killed(engine, tmp_path, corpus, cluster, "taskmanager")
