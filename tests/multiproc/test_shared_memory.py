"""The shared-memory transport between real ranks: results, order, concurrent groups, and lost ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.core.errors import MeshwrightError
from meshwright.elastic.supervisor import Supervisor
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.collectives import all_gather_into, all_reduce, all_to_all_rows
from meshwright.parallel.mesh import Mesh, destroy_mesh, init_mesh
from meshwright.parallel.shared_memory.channel import PeerLostError
from meshwright.spec.load import load_job

SIZES = (0, 1, 13, 4099, 300_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
LAYOUT = ["layout.dp_replicate=2", "layout.tp=2"]
NOTICED_S = 1.0
"""Within which a rank notices that another one has ended."""
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join(run_dir: str, overrides: list[str]) -> tuple[Mesh, CollectiveCounter]:
    """Join the other ranks; the transport is open."""
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(load_job(run_dir + "/job.toml", overrides), counter)
    return mesh, counter


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)  # sums are exact


def check_operations(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> None:
    """All operations of a group against results that are computed locally."""
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    inputs = [values_of(rank, numel, dtype) for rank in ranks]
    total = torch.stack(inputs).sum(0, dtype=dtype)
    summed = inputs[me].clone()
    dist.all_reduce(summed, group=group)
    assert torch.equal(summed, total)
    works = [
        (dist.all_reduce(x, group=group, async_op=True), x) for x in (inputs[me].clone(), inputs[me].clone())
    ]
    for work, x in reversed(works):
        work.wait()
        assert torch.equal(x, total)
    gathered = torch.empty(len(ranks) * numel, dtype=dtype)
    all_gather_into(gathered, inputs[me], group=group)
    assert torch.equal(gathered, torch.cat(inputs))
    listed = [torch.empty_like(inputs[me]) for _ in ranks]
    dist.all_gather(listed, inputs[me], group=group)
    assert torch.equal(torch.cat(listed), gathered)
    scattered = torch.empty(numel, dtype=dtype)
    reduce_scatter_into(scattered, torch.cat(inputs), group=group)
    assert torch.equal(scattered, inputs[me] * len(ranks))
    sent = inputs[me].clone()
    dist.broadcast(sent, group=group, group_src=len(ranks) - 1)
    assert torch.equal(sent, inputs[-1])
    counts = [(me + other) % len(ranks) for other in range(len(ranks))]  # of both directions
    rows = torch.full((sum(counts), numel), me, dtype=dtype)
    received = all_to_all_rows(rows, counts, counts, group.group_name)
    assert received[:, :1].flatten().tolist() == [
        other for other, n in enumerate(counts) for _ in range(n if numel else 0)
    ]
    dist.barrier(group=group)


def check_strided_and_inference(group: dist.ProcessGroup) -> None:
    """Tensors that are not contiguous, need gradients, or are from inference mode; functional collectives."""
    x = torch.ones(6, 4).t()
    dist.all_reduce(x, group=group)
    assert torch.equal(x, torch.full((4, 6), float(group.size())))
    with torch.inference_mode():
        y = torch.ones(1000, dtype=torch.bfloat16)
        dist.all_reduce(y, group=group, async_op=True).wait()
    assert y.sum() == 1000 * group.size()
    scalar = torch.tensor(1.0)
    dist.all_reduce(scalar, group=group)
    assert scalar.shape == ()
    assert scalar == group.size()
    gathered = torch.empty(group.size())
    all_gather_into(gathered, torch.tensor(1.0), group=group)
    assert gathered.tolist() == [1] * group.size()
    rows = torch.ones(6, 2)[::2]  # every other row
    dist.broadcast(rows, group=group, group_src=0, async_op=True).wait()
    dist.all_reduce(rows, group=group)
    assert rows.tolist() == [[group.size()] * 2] * 3
    z = torch.ones(5, requires_grad=True)
    dist.all_reduce(z.data, group=group)
    assert z.tolist() == [group.size()] * 5
    assert all_reduce(torch.ones(3), group.group_name, "avg").tolist() == [1, 1, 1]


def check_concurrent_groups(mesh: Mesh, steps: int) -> None:
    """Calls on two groups in another order on each rank, and futures, do not wait for each other."""
    groups = [mesh.group("dp_replicate"), mesh.group("tp")]
    for step in range(steps):
        order = groups if (mesh.rank + step) % 2 else groups[::-1]
        tensors = {group.group_name: torch.full((1 + 700 * step,), 1.0) for group in groups}
        works = [dist.all_reduce(tensors[group.group_name], group=group, async_op=True) for group in order]
        futures = [work.get_future().then(lambda done: done.value()[0].sum()) for work in works]
        assert [future.wait().item() for future in futures] == [2.0 * (1 + 700 * step)] * 2
        assert mesh.all_reduce_scalars([1.0]) == [4.0]


def run_operations(run_dir, listener, sizes=SIZES, dtypes=DTYPES, steps=500):
    """One of four ranks."""
    before = set(Path("/dev/shm").iterdir())
    mesh, counter = join(run_dir, LAYOUT)
    assert mesh.transport is not None
    for group in (mesh.control, mesh.group("dp_replicate"), mesh.group("tp")):
        for dtype in dtypes:
            for numel in sizes:
                check_operations(group, numel, dtype)
        check_strided_and_inference(group)
    check_concurrent_groups(mesh, steps)
    floats = torch.randn(50_000, generator=torch.Generator().manual_seed(mesh.rank))
    dist.all_reduce(floats, group=mesh.control)
    result = {
        "bits": floats.view(torch.int32).sum().item(),
        "rows": counter.rows(),
        "left": [str(path) for path in set(Path("/dev/shm").iterdir()) - before],
    }
    listener({"event": "operated", "rank": mesh.rank, **result})
    destroy_mesh(mesh)
    return 0


def run_few_operations(run_dir, listener):
    """One of four ranks, for a short test."""
    return run_operations(run_dir, listener, (0, 1, 4099), (torch.float32, torch.bfloat16), 20)


def start_four_ranks(job_file: Path, entry: str) -> list[dict]:
    """Run four ranks; returns what they report."""
    job_file.write_text(job_file.read_text().replace("devices_per_node = 2", "devices_per_node = 4"))
    events = []
    Supervisor(f"{__name__}:{entry}", job_file.parent, 4, 0, 10.0, events.append).run()
    return [event for event in events if event["event"] == "operated"]


def test_operations_on_groups_of_two_and_four_ranks(job_file):
    """The counter counts what the transport runs, and nothing is left in a file system."""
    ranks = start_four_ranks(job_file, "run_few_operations")
    assert len(ranks) == 4
    assert len({rank["bits"] for rank in ranks}) == 1
    assert all(rank["left"] == [] for rank in ranks)
    barriers = [row for row in ranks[0]["rows"] if row["op"] == "barrier"]
    assert [(row["axis"], row["calls"]) for row in barriers] == [
        ("control", 6),
        ("dp_replicate", 6),
        ("tp", 6),
    ]


@pytest.mark.slow
def test_all_operations_twice(job_file):
    """All dtypes and sizes; sums have the same bits on all ranks and in each run."""
    ranks = [*start_four_ranks(job_file, "run_operations"), *start_four_ranks(job_file, "run_operations")]
    assert len(ranks) == 8
    assert len({rank["bits"] for rank in ranks}) == 1


def run_mixed_calls(run_dir, listener, calls=6000):
    """One of four ranks: random operations, sizes, groups, synchronous or not; waits come late, in any order.

    All ranks draw the same calls. They pause at different times.
    """
    mesh, _ = join(run_dir, LAYOUT)
    groups = (mesh.control, mesh.group("dp_replicate"), mesh.group("tp"))
    draw, pause, pending = random.Random(7), random.Random(mesh.rank), []
    for number in range(calls):
        group, ranks = draw.choice([(g, dist.get_process_group_ranks(g)) for g in groups])
        numel = draw.choice((1, 13, 1000, 40_001, 200_000))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.int64))
        op, later = (
            draw.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast")),
            draw.random() < 0.5,
        )
        if pause.random() < 0.01:
            time.sleep(pause.random() / 100)  # another rank waits in the kernel
        mine = torch.full((numel,), mesh.rank + number % 5).to(dtype)
        values = [rank + number % 5 for rank in ranks]
        if op == "all_reduce":
            out, expected = mine, [sum(values)]
            work = dist.all_reduce(mine, group=group, async_op=later)
        elif op == "broadcast":
            out, expected = mine, [values[-1]]
            work = dist.broadcast(mine, group=group, group_src=len(ranks) - 1, async_op=later)
        elif op == "all_gather":
            out, expected = torch.empty(len(ranks) * numel, dtype=dtype), values
            work = dist.all_gather_into_tensor(out, mine, group=group, async_op=later)
        else:
            out, expected = torch.empty(numel, dtype=dtype), [sum(values)]
            work = reduce_scatter_into(out, mine.repeat(len(ranks)), group=group, async_op=later)
        pending.append((number, work if later else None, out, expected))
        if len(pending) > 8:
            check_mixed_call(*pending.pop(pause.randrange(len(pending))))
    for call in pending:
        check_mixed_call(*call)
    listener({"event": "operated", "rank": mesh.rank, "calls": calls})
    destroy_mesh(mesh)
    return 0


def check_mixed_call(number, work, out, expected):
    if work is not None:
        work.wait()
    rows = out.view(len(expected), -1)
    assert all((row == value).all() for row, value in zip(rows, expected, strict=True)), f"call {number}"


@pytest.mark.slow
def test_six_thousand_mixed_calls_on_four_ranks(job_file):
    """No call hangs, and no result is wrong."""
    ranks = start_four_ranks(job_file, "run_mixed_calls")
    assert [rank["calls"] for rank in ranks] == [6000] * 4


def run_threads(run_dir, listener, calls=2000):
    """One of four ranks: a thread for each of three groups, all calling at once, synchronously or not."""
    mesh, _ = join(run_dir, LAYOUT)
    errors = []

    def call(group, seed):
        ranks, draw = dist.get_process_group_ranks(group), random.Random(seed)
        try:
            for number in range(calls):
                x = torch.full((draw.choice((1, 13, 1000, 40_001)),), float(mesh.rank + number % 5))
                work = dist.all_reduce(x, group=group, async_op=draw.random() < 0.5)
                if work is not None:
                    work.wait()
                assert (x == sum(rank + number % 5 for rank in ranks)).all(), f"call {number}"
        except BaseException as error:
            errors.append(repr(error))

    groups = (mesh.control, mesh.group("dp_replicate"), mesh.group("tp"))
    threads = [threading.Thread(target=call, args=(group, 7)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener({"event": "operated", "rank": mesh.rank, "errors": errors})
    destroy_mesh(mesh)
    return 0


@pytest.mark.slow
def test_six_thousand_calls_from_three_threads_per_rank(job_file):
    """Threads that call collectives of different groups at once do not wait for each other."""
    assert [rank["errors"] for rank in start_four_ranks(job_file, "run_threads")] == [[]] * 4


def lose_a_rank(run_dir, listener):
    """Rank 0 waits for rank 1, which sleeps; then rank 1 is killed while rank 0 waits."""
    mesh, _ = join(run_dir, ["layout.dp_replicate=2"])
    mesh.all_reduce_scalars([1.0])
    killed_at = Path(run_dir) / "killed-at"
    if mesh.rank == 1:
        time.sleep(0.5)  # no condition to wait for: rank 0 must not use CPU time meanwhile
        mesh.all_reduce_scalars([1.0])
        time.sleep(0.2)
        killed_at.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    before_s = time.process_time()
    mesh.all_reduce_scalars([1.0])
    cpu_s = time.process_time() - before_s
    work = dist.all_reduce(torch.ones(10), group=mesh.group("dp_replicate"), async_op=True)
    with pytest.raises(PeerLostError, match="Connection closed by peer: rank 1 has ended"):
        mesh.all_reduce_scalars([1.0])
    with pytest.raises(PeerLostError):
        work.wait()
    noticed_s = time.monotonic() - float(killed_at.read_text())
    with pytest.raises(PeerLostError):  # all later calls fail
        dist.all_reduce(torch.ones(1), group=mesh.group("dp_replicate"))
    listener({"event": "noticed", "rank": 0, "noticed_s": noticed_s, "cpu_s": cpu_s})
    destroy_mesh(mesh)
    return 0


def test_a_killed_rank_is_noticed_within_a_second_and_waits_use_no_cpu_time(job_file, tmp_path):
    events = []
    with pytest.raises(MeshwrightError):
        Supervisor(f"{__name__}:lose_a_rank", tmp_path, 2, 0, 10.0, events.append).run()
    (event,) = [event for event in events if event["event"] == "noticed"]
    assert event["noticed_s"] < NOTICED_S
    assert event["cpu_s"] < 0.2


def test_plan_and_checkpoint_record_the_transport(train):
    """Sums of two ranks have the same bits over both transports. A resume over another one says so."""
    over = {}
    for transport in ("gloo", "shared_memory"):
        keys = (
            "layout.dp_replicate=2",
            f"train.transport={transport}",
            "train.steps=3",
            f"run_dir={transport}",
        )
        trained = over[transport] = train(*keys)
        assert f'transport = "{transport}"' in (trained.run_dir / "plan.toml").read_text()
        manifest = next((trained.run_dir / "checkpoints").glob("step-*/manifest.json"))
        assert json.loads(manifest.read_text())["transport"] == transport
    assert over["gloo"].losses == over["shared_memory"].losses
    resumed = train("layout.dp_replicate=2", "train.steps=5", "run_dir=gloo", resume=True)
    events = [json.loads(line) for line in (resumed.run_dir / "events.jsonl").read_text().splitlines()]
    notes = next(e["notes"] for e in events if e["event"] == "resumed" and e["rank"] == 0)
    assert "the transport was gloo, is shared_memory: equal up to rounding" in notes
    assert {e["transport"] for e in events if e["event"] == "ready"} == {"gloo", "shared_memory"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_layouts_train_over_both_transports(train, transport):
    """The losses of four ranks agree with those of one, over both."""
    keys = (f"train.transport={transport}", "cluster.devices_per_node=4")
    one = train("train.steps=6")
    for layout in (
        ("dp_shard=2", "tp=2"),
        ("dp_replicate=4",),
        ("dp_shard=4", "zero=3"),
        ("pp=2", "dp_replicate=2"),
    ):
        several = train(*keys, *(f"layout.{degree}" for degree in layout))
        assert several.losses == pytest.approx(one.losses, rel=1e-5)
