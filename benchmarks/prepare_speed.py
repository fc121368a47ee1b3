# ruff: noqa: PLC0415 - a child imports only what it measures
"""Speed of ``wordcount``, ``prepare`` and the loader, as ratios measured in one run on one machine.

    python benchmarks/prepare_speed.py wordcount FILE.jsonl [--spark-python PYTHON] [--repeat 3]
    python benchmarks/prepare_speed.py dedup FILE.jsonl [--spark-python PYTHON] [--repeat 3]
    python benchmarks/prepare_speed.py tokenize FILE.jsonl [--vocab 32000] [--characters 20000000]
    python benchmarks/prepare_speed.py loader [--shards-gb 100]
    python benchmarks/prepare_speed.py memory FILE-OR-FOLDER [--tokenizer byte]

``wordcount`` and ``dedup`` run our embedded engine and our Spark engine (local[2]) in turn, each in a
process of its own, and print the median of each and their ratio; engine start is part of both. DuckDB's and
Spark's own SQL is timed beside them. ``dedup`` is the scan and the shuffle by digest. ``tokenize`` compares
our tokenize stage with ``datasets.map`` where that package is installed, and with a bare loop over
the tokenizers library. ``loader`` reads samples from memory-mapped shards in two processes, and opens
sparse shards of ``--shards-gb``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.core.files import folder_bytes

CHILD = "--child"


def run_child(python: str, *arguments: str) -> dict[str, Any]:
    """One measurement in a process of its own; its last line is JSON."""
    started = time.monotonic()
    done = subprocess.run([python, __file__, CHILD, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return {**json.loads(done.stdout.splitlines()[-1]), "process_s": time.monotonic() - started}


def child_wordcount(engine: str, file: str) -> dict[str, Any]:
    """Count words on an engine."""
    from meshwright.data.engines.choose import build_engine
    from meshwright.data.pipeline.wordcount import count_words

    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=Path(file).parent) as folder:
        running = build_engine(engine, 2)
        ready = time.monotonic()
        counted = count_words([file], Path(folder), running)
        running.close()
    return {
        "distinct": counted.distinct,
        "total": counted.total,
        "start_s": ready - started,
        "seconds": time.monotonic() - started,
    }


def child_dedup(engine: str, file: str) -> dict[str, Any]:
    """Find exact duplicates on an engine: scan and shuffle."""
    from meshwright.data.corpus_spec import CorpusSpec
    from meshwright.data.engines.choose import build_engine
    from meshwright.data.engines.engine import map_tasks, shuffle_rows
    from meshwright.data.engines.work_folder import WorkFolder, count_rows
    from meshwright.data.pipeline.duplicates import duplicates_stage
    from meshwright.data.pipeline.scan import CorpusTask, ScanTask, scan_stage
    from meshwright.data.pipeline.splits import plan_splits

    def quiet(name: str, done: int) -> None:
        pass

    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=Path(file).parent) as folder:
        running = build_engine(engine, 2)
        ready = time.monotonic()
        work = WorkFolder(Path(folder))
        corpus = CorpusTask(CorpusSpec((file,), "out"), Path(file).parent, buckets=16)
        splits = plan_splits([file], Path(file).parent, ())
        keys = map_tasks(running, work, scan_stage(), [ScanTask(corpus, split) for split in splits], quiet)
        found = shuffle_rows(running, work, duplicates_stage(), keys, quiet)
        duplicates = sum(map(count_rows, found))
        running.close()
    return {"duplicates": duplicates, "start_s": ready - started, "seconds": time.monotonic() - started}


def duckdb_sql(what: str, file: str) -> float:
    """The same question in DuckDB's SQL, with its own rules for words and hashes."""
    import duckdb

    options = "delim='\x01', columns={'value': 'VARCHAR'}, header=false, quote='', escape=''"
    source = f"read_csv('{file}', {options}, max_line_size=100000000)"
    split = "unnest(regexp_split_to_array(value, '\\s+')) AS word"
    queries = {
        "wordcount": f"SELECT count(*) FROM (SELECT word FROM (SELECT {split} FROM {source}) GROUP BY word)",
        "dedup": f"SELECT count(*) - count(DISTINCT hash(value)) FROM {source}",
    }
    started = time.monotonic()
    with duckdb.connect(":memory:") as database:
        database.execute("SET threads = 2")
        database.execute(queries[what]).fetchall()
    return time.monotonic() - started


def child_sql(what: str, file: str) -> dict[str, Any]:
    """The same question in Spark's SQL, with its own rules for words and hashes."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as sql

    started = time.monotonic()
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    ready = time.monotonic()
    lines = session.read.text(file)
    if what == "wordcount":
        words = lines.select(sql.explode(sql.split("value", r"\s+")).alias("word"))
        words.groupBy("word").count().count()
    else:
        lines.select(sql.xxhash64("value")).distinct().count()
    done = time.monotonic()
    session.stop()
    return {"start_s": ready - started, "seconds": done - started}


def compare_engines(what: str, file: Path, spark_python: str, repeat: int) -> dict[str, Any]:
    """Our engine and our Spark engine in turn."""
    times: dict[str, list[dict[str, Any]]] = {"embedded": [], "spark": []}
    native, spark_sql = [], []
    for _ in range(repeat):
        times["embedded"].append(run_child(sys.executable, what, "embedded", str(file.absolute())))
        times["spark"].append(run_child(spark_python, what, "spark", str(file.absolute())))
        native.append(duckdb_sql(what, str(file)))
        spark_sql.append(run_child(spark_python, f"{what}-sql", "spark", str(file.absolute())))
    answers = [
        {key: value for key, value in run.items() if not key.endswith("_s") and key != "seconds"}
        for runs in times.values()
        for run in runs
    ]
    if any(answer != answers[0] for answer in answers):
        raise SystemExit(f"the engines disagree: {answers}")
    medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in times.items()}
    without_start = statistics.median(run["seconds"] - run["start_s"] for run in times["spark"])
    return {
        "what": what,
        "file_mb": file.stat().st_size / 1e6,
        **answers[0],
        "embedded_s": medians["embedded"],
        "spark_s": medians["spark"],
        "spark_without_start_s": without_start,
        "duckdb_sql_s": statistics.median(native),
        "spark_sql_s": statistics.median(run["seconds"] for run in spark_sql),
        "spark_sql_without_start_s": statistics.median(run["seconds"] - run["start_s"] for run in spark_sql),
        "ratio": medians["spark"] / medians["embedded"],
        "load": os.getloadavg()[0],
    }


def sample(file: Path, characters: int) -> list[str]:
    """The first texts of a file."""
    texts, size = [], 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size >= characters:
                break
    return texts


def compare_tokenizing(file: Path, vocab: int, characters: int, repeat: int) -> dict[str, Any]:
    """The tokenize stage, ``datasets.map`` and the bare library, in turn."""
    from meshwright.data.corpus import Document
    from meshwright.data.encode_pieces import encode_pieces, split_documents
    from meshwright.data.tokenizer import BpeTokenizer

    texts = sample(file, characters)
    tokenizer = BpeTokenizer.train(texts[: len(texts) // 4], vocab)
    inner = tokenizer._inner  # the same tokenizer for all
    size = sum(len(text.encode()) for text in texts)

    def ours() -> int:
        documents = ((None, Document("", text)) for text in texts)
        pieces = encode_pieces(split_documents(documents), tokenizer)
        return sum(len(encoded.tokens) for batch in pieces for _, encoded in batch)

    def library() -> int:
        batches = (texts[at : at + 256] for at in range(0, len(texts), 256))
        return sum(
            len(encoding.ids)
            for batch in batches
            for encoding in inner.encode_batch_fast(batch, add_special_tokens=False)
        )

    def hf_datasets() -> int:
        import datasets
        import pyarrow

        datasets.disable_progress_bars()
        table = datasets.table.InMemoryTable(pyarrow.table({"text": texts}))
        rows = datasets.Dataset(table, fingerprint="texts")  # else it pickles the table
        encode = lambda batch: {  # noqa: E731
            "ids": [e.ids for e in inner.encode_batch_fast(batch["text"], add_special_tokens=False)]
        }
        name = f"run-{time.monotonic_ns()}"  # else it pickles the function
        mapped = rows.map(encode, batched=True, remove_columns=["text"], new_fingerprint=name)
        return sum(mapped.with_format("arrow")[:]["ids"].combine_chunks().value_lengths().to_pylist())

    ways = {"ours": ours, "library": library}
    try:
        import datasets  # noqa: F401
    except ImportError:
        pass
    else:
        ways["hf_datasets"] = hf_datasets
    times: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for _ in range(repeat):
        for name, way in ways.items():
            started = time.monotonic()
            tokens[name] = way()
            times[name].append(time.monotonic() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    result: dict[str, Any] = {"text_mb": size / 1e6, "tokens": tokens, "load": os.getloadavg()[0]}
    result |= {f"{name}_mb_per_s": size / 1e6 / seconds for name, seconds in medians.items()}
    result["of_library_limit"] = medians["library"] / medians["ours"]
    if "hf_datasets" in medians:
        result["ratio_to_hf_datasets"] = medians["hf_datasets"] / medians["ours"]
    return result


def write_sparse(folder: Path, gigabytes: float) -> int:
    """A prepared folder of sparse shards: sizes without content. The number of tokens."""
    from meshwright.data.shard_writer import write_index
    from meshwright.data.shards import SHARD_TOKENS, ShardEntry
    from meshwright.data.tokenizer import ByteTokenizer

    count = max(1, round(gigabytes * 1e9 / (2 * SHARD_TOKENS)))
    entries = []
    for number in range(count):
        entry = ShardEntry(
            f"train-{number:05d}.bin", SHARD_TOKENS, "0" * 64, f"train-{number:05d}.docs.u64", 1, "0" * 64
        )
        for name, size in ((entry.file, 2 * SHARD_TOKENS), (entry.documents_file, 8)):
            with (folder / name).open("wb") as file:
                file.truncate(size)
        entries.append(entry)
    write_index(folder, ByteTokenizer(), tuple(entries), ())
    return count * SHARD_TOKENS


def read_samples(folder: str, seq_len: int, rank: int, seconds: float, results: Any) -> None:
    """One process of a loader: batches of 64 samples in the order of training."""
    from meshwright.data.dataset import TokenDataset

    dataset = TokenDataset.open(Path(folder), "train", seq_len)
    order = dataset.order(0)
    started, tokens, position = time.monotonic(), 0, rank * 64
    while time.monotonic() - started < seconds:
        positions = (np.arange(position, position + 64)) % len(dataset)
        batch = dataset.read(order.samples_at(positions))
        tokens += int(batch.tokens.size)
        position += 128
    results.put((tokens, time.monotonic() - started))


def measure_loader(gigabytes: float, seq_len: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of two processes, and the time to the first batch of a large folder."""
    from meshwright.data.dataset import TokenDataset

    with tempfile.TemporaryDirectory() as place:
        large, warm = Path(place) / "large", Path(place) / "warm"
        large.mkdir()
        warm.mkdir()
        tokens = write_sparse(large, gigabytes)
        write_sparse(warm, 0.5)
        started = time.monotonic()
        dataset = TokenDataset.open(large, "train", seq_len)
        dataset.read(dataset.order(0).samples_at(np.arange(64)))
        first_s = time.monotonic() - started
        results: Any = multiprocessing.Queue()
        readers = [
            multiprocessing.Process(target=read_samples, args=(str(warm), seq_len, rank, seconds, results))
            for rank in range(2)
        ]
        for reader in readers:
            reader.start()
        rates = [count / taken for count, taken in (results.get() for _ in readers)]
        for reader in readers:
            reader.join()
    return {
        "index_tokens": tokens,
        "first_batch_s": first_s,
        "tokens_per_s": sum(rates),
        "processes": 2,
        "seq_len": seq_len,
        "load": os.getloadavg()[0],
    }


def group_memory(root: int) -> int:
    """Proportional memory (PSS) of a process and its children, in bytes."""
    total, pending = 0, [root]
    while pending:
        process = pending.pop()
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += 1024 * int(rollup.split("\nPss:")[1].split()[0])
            pending += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return total


def measure_memory(file: Path, tokenizer: str) -> dict[str, Any]:
    """Peak memory of all processes of the embedded engine, sampled ten times per second."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        corpus = Path(folder) / "corpus.toml"
        corpus.write_text(f'sources = ["{file.absolute()}"]\nout = "out"\ntokenizer = "{tokenizer}"\n')
        command = [
            sys.executable,
            "-m",
            "meshwright",
            "prepare",
            str(corpus),
            "--engine",
            "embedded",
            "--json",
        ]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak, ended = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.1):
                peak = max(peak, group_memory(child.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, _ = child.communicate()
        ended.set()
        watcher.join()
    report = json.loads(output)
    return {
        "file_mb": (folder_bytes(file) if file.is_dir() else file.stat().st_size) / 1e6,
        "peak_pss_mb": peak / 1e6,
        "tokenizer": tokenizer,
        **{key: report[key] for key in ("documents_out", "duplicates", "tokens", "seconds", "bytes_per_s")},
    }


def main() -> int:
    """Run from the command line."""
    if CHILD in sys.argv:
        what, engine, file = sys.argv[2:]
        if what.endswith("-sql"):
            result = child_sql(what.removesuffix("-sql"), file)
        else:
            result = {"wordcount": child_wordcount, "dedup": child_dedup}[what](engine, file)
        print(json.dumps(result))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["wordcount", "dedup", "tokenize", "loader", "memory"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--spark-python", default=".venv-spark/bin/python")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--characters", type=int, default=20_000_000)
    parser.add_argument("--shards-gb", type=float, default=100)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--tokenizer", default="byte")
    given = parser.parse_args()
    if given.what == "loader":
        result = measure_loader(given.shards_gb, given.seq_len, given.seconds)
    elif given.file is None:
        parser.error(f"{given.what} needs a file")
    elif given.what == "tokenize":
        result = compare_tokenizing(given.file, given.vocab, given.characters, given.repeat)
    elif given.what == "memory":
        result = measure_memory(given.file, given.tokenizer)
    else:
        result = compare_engines(given.what, given.file, given.spark_python, given.repeat)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
