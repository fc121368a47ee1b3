"""Buckets are fixed before the first step, as planned; torch's own are not."""

from __future__ import annotations

import json

from torch.nn.parallel import DistributedDataParallel

from meshwright.plan.buckets import bucket_parameters
from meshwright.plan.shapes import list_parameters
from meshwright.run.collectives.counter import CollectiveCounter
from meshwright.run.mesh import join_ranks, leave_ranks
from meshwright.run.models.init import build_model
from meshwright.run.parallel.data import apply_replicate
from meshwright.spec.load import load_job


def _calls_by_step(module, job, counter, seen):
    import torch

    tokens = torch.zeros((1, job.data.seq_len), dtype=torch.int64)
    calls = []
    for _ in range(3):
        before = sum(row["calls"] for row in counter.rows())
        module(tokens, tokens).backward()
        calls.append(sum(row["calls"] for row in counter.rows()) - before)
    seen["calls"] = calls


def inspect_buckets(run_dir, listener):
    """In a rank: bucket contents as the hook sees them, and calls a step, ours and torch's."""
    job = load_job(run_dir + "/job.toml", ["layout.dp_replicate=2", "layout.bucket_mb=0.05"])
    counter = CollectiveCounter()
    counter.install()
    ranks = join_ranks(job, counter)
    ours = apply_replicate(build_model(job, ranks.device), job, ranks)
    names = {id(p): n for n, p in ours.module.named_parameters()}
    buckets: list[list[str]] = []
    seen: dict[str, object] = {}

    import meshwright.run.parallel.data as data

    honest = data.sum_hook
    recorder = apply_replicate.__globals__["HOOKS"]

    def hook(group, bucket):
        buckets.append([names[id(p)] for p in bucket.parameters()])
        return honest(group, bucket)

    recorder["none"] = hook
    ours = apply_replicate(ours.module, job, ranks)
    _calls_by_step(ours, job, counter, seen)
    stock = DistributedDataParallel(build_model(job, ranks.device), bucket_cap_mb=0.05)
    stock_seen: dict[str, object] = {}
    _calls_by_step(stock, job, counter, stock_seen)
    if ranks.rank == 0:
        listener(
            {
                "event": "buckets",
                "rank": 0,
                "ours": seen["calls"],
                "stock": stock_seen["calls"],
                "names": buckets,
            }
        )
    leave_ranks(ranks)
    return 0


def test_buckets_are_the_planned_ones_from_the_first_step(job_file, tmp_path):
    """Contents and number of the buckets equal the plan in every step; stock DDP changes after step 0."""
    from meshwright.launch.local import LocalLaunch

    heard = []
    launch = LocalLaunch(f"{__name__}:inspect_buckets", tmp_path, 2, 0, 10.0, heard.append)
    launch.run()
    event = json.loads(json.dumps(next(e for e in heard if e["event"] == "buckets")))
    job = load_job(str(job_file), ["layout.dp_replicate=2", "layout.bucket_mb=0.05"])
    planned = bucket_parameters(list_parameters(job.model), 0.05)
    assert len(planned) > 2, "the test needs several buckets"
    assert event["ours"] == [len(planned)] * 3
    assert event["names"][: len(planned)] == planned
    assert event["names"] == planned * 3
    assert event["stock"][0] != event["stock"][2], "torch no longer rebuilds: fix_buckets may be obsolete"
