"""The collective counter does not deadlock: many collectives with Python futures on two process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.elastic.supervisor import Supervisor
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.spec.load import load_job

ROUNDS = 1000


def run_collectives(run_dir, listener):
    """One rank: asynchronous all-reduces with Python futures, between synchronous ones."""
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(load_job(run_dir + "/job.toml", ["layout.dp_replicate=2"]), counter)
    for _ in range(ROUNDS):
        work = dist.all_reduce(torch.ones(1000), group=mesh.group("dp_replicate"), async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
        mesh.all_reduce_scalars([1.0])
        assert future.wait()[0] == 2.0
        del work, future
    if mesh.rank == 0:
        listener({"event": "counted", "rank": 0, "rows": counter.rows()})
    destroy_mesh(mesh)
    return 0


def test_the_counter_does_not_deadlock_with_python_futures(job_file, tmp_path):
    """A counter that holds the GIL during the redispatch deadlocks here within seconds."""
    events = []
    Supervisor(f"{__name__}:run_collectives", tmp_path, 2, 0, 10.0, events.append).run()
    (event,) = [e for e in events if e["event"] == "counted"]
    assert {row["axis"]: row["calls"] for row in event["rows"]} == {"dp_replicate": ROUNDS, "control": ROUNDS}
