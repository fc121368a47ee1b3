"""Our DDP uses the planned buckets from the first step; stock DDP rebuilds its buckets after it."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from meshwright.elastic.supervisor import Supervisor
from meshwright.layout.ddp_buckets import bucket_parameters
from meshwright.layout.parameters import list_parameters
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel import ddp as data
from meshwright.parallel.build import build_model
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.spec.load import load_job

OVERRIDES = ["layout.dp_replicate=2", "layout.bucket_mb=0.05"]


def _calls_by_step(module, job, counter):
    """Collective calls in each of three steps."""
    tokens = torch.zeros((1, job.data.seq_len), dtype=torch.int64)
    calls = []
    for _ in range(3):
        before = sum(row["calls"] for row in counter.rows())
        module(tokens, tokens).backward()
        calls.append(sum(row["calls"] for row in counter.rows()) - before)
    return calls


def inspect_buckets(run_dir, listener):
    """One rank: bucket contents in the hook, and collective calls per step, ours and stock DDP's."""
    job = load_job(run_dir + "/job.toml", OVERRIDES)
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(job, counter)
    model = build_model(job, mesh.device)
    names = {id(p): n for n, p in model.named_parameters()}
    buckets: list[list[str]] = []

    def recording_hook(group, bucket):
        buckets.append([names[id(p)] for p in bucket.parameters()])
        return data.all_reduce_hook(group, bucket)

    data.HOOKS["none"] = recording_hook
    ours = _calls_by_step(data.apply_ddp(model, job, mesh, "dp_replicate"), job, counter)
    stock = DistributedDataParallel(build_model(job, mesh.device), bucket_cap_mb=0.05)
    theirs = _calls_by_step(stock, job, counter)
    if mesh.rank == 0:
        listener({"event": "buckets", "rank": 0, "ours": ours, "stock": theirs, "names": buckets})
    destroy_mesh(mesh)
    return 0


def test_buckets_are_the_planned_ones_from_the_first_step(job_file, tmp_path):
    """Contents and number of the buckets equal the plan in every step; stock DDP changes after step 0."""
    events = []
    launch = Supervisor(f"{__name__}:inspect_buckets", tmp_path, 2, 0, 10.0, events.append)
    launch.run()
    event = next(e for e in events if e["event"] == "buckets")
    job = load_job(str(job_file), OVERRIDES)
    planned = bucket_parameters(list_parameters(job.model), 0.05)
    assert len(planned) > 2, "the test needs several buckets"
    assert event["ours"] == [len(planned)] * 3
    assert event["names"] == planned * 3
    assert event["stock"][0] != event["stock"][2], "torch no longer rebuilds: fix_buckets may be obsolete"
