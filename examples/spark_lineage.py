"""Lineage and caching in Spark, on an iterative job over prepared shards: a random walk over pairs of tokens.

    .venv-spark/bin/python examples/spark_lineage.py PREPARED [--iterations 4] [--cache]

The pairs of adjacent tokens and their counts are a DataFrame that reads the memory-mapped shards. Every
iteration joins the probability of each token with the pairs and sums it up by the next token, then an
action asks for the change. A DataFrame is a recipe, its lineage: without ``--cache`` every action follows
it back to the shards. With it, the pairs are kept after the first action. The output is JSON: how often a
shard was read, the seconds of every iteration, the tokens with the highest probability, and how often
the last plan reads the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from meshwright.data.shards import ShardFolder


def count_pairs(session: Any, folder: Path, reads: Path) -> Any:
    """Pairs of adjacent tokens, from the shards; every read of a shard leaves a file in ``reads``."""
    shards = len(ShardFolder.open(folder).index.splits.train.shards)

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        opened = ShardFolder.open(folder)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                (reads / f"{number}-{time.time_ns()}").touch()
                tokens = opened.map_tokens(opened.index.splits.train.shards[number]).astype(np.int64)
                pairs, counts = np.unique(tokens[:-1] * 2**32 + tokens[1:], return_counts=True)
                columns = [pairs >> 32, pairs & (2**32 - 1), counts.astype(np.int64)]
                yield pa.RecordBatch.from_arrays(list(map(pa.array, columns)), ["token", "next", "count"])

    rows = session.range(0, shards, 1, shards).mapInArrow(read, "token long, next long, count long")
    pairs = rows.groupBy("token", "next").agg(sql.sum("count").alias("count"))
    totals = pairs.groupBy("token").agg(sql.sum("count").alias("total"))
    return pairs.join(totals, "token").withColumn("share", sql.col("count") / sql.col("total"))


def walk(session: Any, folder: Path, iterations: int, cache: bool, reads: Path) -> dict[str, Any]:
    """Walk over the pairs."""
    pairs = count_pairs(session, folder, reads)
    if cache:
        pairs = pairs.cache()
    tokens = pairs.select("token").distinct()
    current = tokens.withColumn("probability", sql.lit(1.0 / tokens.count()))
    seconds = []
    for _ in range(iterations):
        started = time.monotonic()
        flow = pairs.join(current, "token").withColumn("flow", sql.col("share") * sql.col("probability"))
        current = flow.groupBy(sql.col("next").alias("token")).agg(sql.sum("flow").alias("probability"))
        top = current.orderBy(sql.desc("probability"), "token").limit(3).collect()
        seconds.append(round(time.monotonic() - started, 2))
    plan = current._jdf.queryExecution().executedPlan().toString()
    return {
        "cache": cache,
        "shard_reads": len(list(reads.iterdir())),
        "seconds": seconds,
        "plan_reads_cache": plan.count("InMemoryTableScan"),
        "top": [[row["token"], round(row["probability"], 6)] for row in top],
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prepared", type=Path)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--cache", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .getOrCreate()
    )
    with tempfile.TemporaryDirectory() as reads:
        print(
            json.dumps(walk(session, given.prepared.absolute(), given.iterations, given.cache, Path(reads)))
        )
    session.stop()


if __name__ == "__main__":
    main()
