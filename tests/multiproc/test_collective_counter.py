"""The collective counter does not deadlock: many collectives with Python futures on two process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.elastic.supervisor import Supervisor
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.spec.load import load_job

ROUNDS = 1000
MANY_ROUNDS = 6000


def run_collectives(run_dir, listener, transport="shared_memory", rounds=ROUNDS):
    """One rank: asynchronous all-reduces with Python futures, between synchronous ones."""
    counter = CollectiveCounter()
    counter.install()
    overrides = ["layout.dp_replicate=2", f"train.transport={transport}"]
    mesh = init_mesh(load_job(run_dir + "/job.toml", overrides), counter)
    for _ in range(rounds):
        work = dist.all_reduce(torch.ones(1000), group=mesh.group("dp_replicate"), async_op=True)
        future = work.get_future().then(lambda done: done.value()[0])
        mesh.all_reduce_scalars([1.0])
        assert future.wait()[0] == 2.0
        del work, future
    if mesh.rank == 0:
        listener({"event": "counted", "rank": 0, "rows": counter.rows()})
    destroy_mesh(mesh)
    return 0


def run_over_gloo(run_dir, listener):
    """One rank over gloo."""
    return run_collectives(run_dir, listener, "gloo")


def run_many(run_dir, listener):
    """One rank, for a long test."""
    return run_collectives(run_dir, listener, rounds=MANY_ROUNDS)


@pytest.mark.parametrize(
    ("entry", "rounds"),
    [
        ("run_collectives", ROUNDS),
        ("run_over_gloo", ROUNDS),
        pytest.param("run_many", MANY_ROUNDS, marks=pytest.mark.slow),
    ],
)
def test_the_counter_does_not_deadlock_with_python_futures(job_file, tmp_path, entry, rounds):
    """A counter that holds the GIL during the redispatch to gloo deadlocks here within seconds."""
    events = []
    Supervisor(f"{__name__}:{entry}", tmp_path, 2, 0, 10.0, events.append).run()
    (event,) = [e for e in events if e["event"] == "counted"]
    assert {row["axis"]: row["calls"] for row in event["rows"]} == {"dp_replicate": rounds, "control": rounds}
