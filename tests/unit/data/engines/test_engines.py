"""Engines: a killed worker, a missing package, a wrong name; the rows of a shuffle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.data.engines import choose
from meshwright.data.engines.choose import (
    build_engine,
    check_address,
    check_engine,
    check_java,
    default_engine,
)

pytest.importorskip("duckdb")

import numpy as np
import pyarrow as pa

from meshwright.data.engines import embedded
from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.engines.engine import map_tasks, shuffle_rows
from meshwright.data.engines.stages import MapStage, ShuffleStage
from meshwright.data.engines.work_folder import WorkFolder, read_batches, write_batches

SCHEMA = pa.schema([("bucket", pa.int32()), ("value", pa.int64())])


def emit(task):
    """Rows in reverse; the first attempt of task 2 kills its process."""
    number, folder = task
    mark = Path(folder) / "killed"
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    values = [100 * number + n for n in range(40)][::-1]
    yield pa.RecordBatch.from_pydict({"bucket": [v % 3 for v in values], "value": values}, SCHEMA)


def first_and_last(batches):
    table = pa.Table.from_batches(list(batches))
    yield from table.take([0, len(table) - 1]).to_batches()


def test_a_killed_worker_is_replaced_and_its_task_runs_again(tmp_path):
    work = WorkFolder(tmp_path / "work")
    work.path.mkdir()
    engine = EmbeddedEngine(2)
    shown = []
    try:
        tasks = [(number, str(tmp_path)) for number in range(6)]
        stage = MapStage("emit", emit, SCHEMA)
        results = map_tasks(engine, work, stage, tasks, lambda *done: shown.append(done))
        sort = ShuffleStage("sort", ("value",), first_and_last, SCHEMA, SCHEMA)
        ordered = shuffle_rows(engine, work, sort, results, lambda *done: None)
    finally:
        engine.close()
    assert (tmp_path / "killed").exists()
    assert [path.stem for path in results] == [f"{n:05d}" for n in range(6)]
    assert shown[-1] == ("emit", 6)
    found = [[b.column("value").to_pylist() for b in read_batches(path)] for path in ordered]
    assert found == [[[0, 537]], [[1, 538]], [[2, 539]]]


WIDE = pa.schema([("bucket", pa.int32()), *((f"value_{n}", pa.int64()) for n in range(4))])


def count_sorted(batches):
    rows, last = 0, -1
    for batch in batches:
        values = batch.column("value_0").to_numpy()
        assert last <= values[0]
        assert (values[1:] >= values[:-1]).all()
        rows, last = rows + len(values), values[-1]
    yield pa.RecordBatch.from_pydict({name: [rows] for name in WIDE.names}, WIDE)


def sort_many(folder, rows):
    """Sort random rows with many workers; how many came out."""
    inputs = [folder / f"{n}.arrow" for n in range(16)]
    for number, path in enumerate(inputs):
        values = np.random.default_rng(number).integers(0, 2**60, rows // len(inputs))
        table = pa.table({name: (values % 4 if name == "bucket" else values) for name in WIDE.names})
        write_batches(path, WIDE, table.cast(WIDE).to_batches(max_chunksize=16384))
    work = WorkFolder(folder / "work")
    work.path.mkdir()
    stage = ShuffleStage("sort", ("value_0", "value_1"), count_sorted, WIDE, WIDE)
    results = shuffle_rows(EmbeddedEngine(32), work, stage, inputs, lambda *done: None)
    return sum(batch.column("value_0")[0].as_py() for path in results for batch in read_batches(path))


def keep_or_die(batches):
    """The rows as they came; the first attempt of bucket 2 kills its process."""
    rows = list(batches)
    mark = Path(rows[0].column("mark")[0].as_py())
    if rows[0].column("bucket")[0].as_py() == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from rows


def test_buckets_that_are_sorted_in_workers_equal_those_of_duckdb(tmp_path):
    """Buckets go across the batches of a file, miss from some files, and a worker is killed."""
    schema = pa.schema([("bucket", pa.int32()), ("value", pa.int64()), ("mark", pa.string())])
    mark, random = tmp_path / "killed", np.random.default_rng(0)
    inputs = [tmp_path / f"{n}.arrow" for n in range(5)]
    for number, path in enumerate(inputs):
        buckets = np.sort(random.choice([0, 2, 3, 7, 9], 100)) if number else np.full(100, 7)
        columns = {
            "bucket": buckets,
            "value": random.permutation(100) + 100 * number,
            "mark": [str(mark)] * 100,
        }
        write_batches(path, schema, pa.table(columns, schema).to_batches(max_chunksize=16))
    found = []
    for bucket_order in (True, False):
        work = WorkFolder(tmp_path / f"work-{bucket_order}")
        work.path.mkdir()
        stage = ShuffleStage("sort", ("value",), keep_or_die, schema, schema, bucket_order)
        engine = EmbeddedEngine(2)
        try:
            results = shuffle_rows(engine, work, stage, inputs, lambda *done: None)
        finally:
            engine.close()
        assert mark.exists()
        found.append({path.name: pa.Table.from_batches(read_batches(path)).to_pydict() for path in results})
    assert found[0] == found[1]
    assert list(found[0]) == [f"{n:05d}.arrow" for n in (0, 2, 3, 7, 9)]
    assert all(rows["value"] == sorted(rows["value"]) for rows in found[0].values())


def test_many_workers_sort_within_the_memory_of_duckdb(tmp_path):
    """DuckDB with 32 threads ran out of its 128 MB at 3 million rows."""
    assert sort_many(tmp_path, 3_000_000) == 3_000_000


def test_an_error_of_duckdb_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "SORT_MEMORY_MB", 2)
    with pytest.raises(
        UserError, match=r"DuckDB cannot sort the rows of sort: Out of Memory.*data-engine-failed"
    ):
        sort_many(tmp_path, 1_000_000)


@pytest.mark.parametrize(("chosen", "used"), [(None, "system"), ("mimalloc", "mimalloc")])
def test_arrow_uses_malloc_unless_the_user_chooses(monkeypatch, chosen, used):
    """With Arrow's own allocator the preparation of 1 GB of text took 80 MB more."""
    monkeypatch.delenv("ARROW_DEFAULT_MEMORY_POOL", raising=False)
    if chosen:
        monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", chosen)
    code = (
        "from meshwright.data.engines.work_folder import arrow as load; print(load().default_memory_pool())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"backend_name={used} " in done.stdout


SCRIPT = """
import meshwright as mw
from meshwright.data.pipeline import splits
print("started")
splits.SPLIT_FILES = 1
print(mw.count_words(["text"], engine="embedded", parallelism=2).total)
print(mw.prepare_corpus("corpus.toml", engine="embedded", parallelism=2).documents_out)
"""


@pytest.mark.parametrize("from_standard_input", [False, True])
def test_a_script_without_a_main_guard_starts_workers(tmp_path, from_standard_input):
    """Workers do not import the main module: it would run again, and ``python -`` has no file."""
    (tmp_path / "text").mkdir()
    for number in range(5):  # each is a split
        (tmp_path / "text" / f"{number}.txt").write_text(f"number {number}")
    (tmp_path / "corpus.toml").write_text('sources = ["text"]\nout = "out"\n')
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-" if from_standard_input else "script.py"],
        cwd=tmp_path,
        input=SCRIPT if from_standard_input else "",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["started", "10", "5"], done.stderr


def test_the_default_is_embedded_or_says_what_is_missing(monkeypatch):
    assert default_engine()[0] == "embedded"
    monkeypatch.setattr(choose, "has_package", lambda name: name != "duckdb")
    name, reason = default_engine()
    assert name == "reference"
    assert "duckdb" in reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dask", None, None), "Use one of reference, embedded, spark, ray, flink"),
        (("embedded", "host:1", None), "address"),
        (("embedded", None, 0), "parallelism"),
        (("reference", None, 7), "parallelism.*one process"),
        (("flink", "http://host:8081", None), "Use host:8081"),
        (("flink", "host:rest", None), "Use host:8081"),
        (("ray", "host", None), "Use host:6379"),
        (("ray", "host:99999", None), "Use host:6379"),
        (("spark", "host:7077", None), "Use spark://host:7077"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=rf"{message}.*\[api-argument\]"):
        check_engine(*arguments)


@pytest.mark.parametrize(
    ("engine", "address"),
    [
        ("flink", "host:8081"),
        ("flink", "host"),
        ("flink", "[::1]:8081"),
        ("ray", "10.0.0.1:6379"),
        ("ray", "auto"),
        ("ray", "ray://host:10001"),
        ("spark", "spark://a:7077,b:7077"),
        ("spark", "local[2]"),
        ("spark", "yarn"),
    ],
)
def test_addresses_of_clusters_are_accepted(engine, address):
    check_address(engine, address)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(choose, "has_package", lambda name: False)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    for name, extra in (("spark", "prepare-spark"), ("ray", "prepare-ray"), ("flink", "make setup-flink")):
        with pytest.raises(UserError, match=rf"{extra}.*\[install-missing-\w+\]"):
            build_engine(name)


def test_a_missing_or_old_java_names_the_package(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match=r"no Java is installed.*openjdk-17-jre-headless.*install-missing-java"
    ):
        check_java("spark")
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019' >&2\n")
    java.chmod(0o755)
    with pytest.raises(UserError, match=r"Java 11 .*\[install-missing-java\]"):
        check_java("flink")
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\" 2025' >&2\n")
    check_java("flink")
