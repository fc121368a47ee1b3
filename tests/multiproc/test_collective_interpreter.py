"""Collective schedules on real ranks, over gloo: results, and bytes in the collective counter."""

from __future__ import annotations

import torch
import torch.distributed as dist

from collective_reference import make_inputs, wrong_chunks
from meshwright.elastic.supervisor import Supervisor
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.collective_interpreter import ScheduleRunner, run_schedule
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.traffic import count_traffic
from meshwright.spec.load import load_job

RANKS = 4
SIZES = (3, 10_007)
SEGMENT_BYTES = 8192


def check_schedules(group: dist.ProcessGroup, sizes: tuple[int, ...]) -> int:
    """Every operation by every algorithm on one group. Returns the bytes that this rank must have sent."""
    ranks, me, sent = group.size(), group.rank(), 0
    for op in Op:
        for algorithm in list_algorithms(op):
            grouped = {"ranks_per_node": 2} if algorithm == "hierarchical" else {}
            schedule = build_collective(op, algorithm, ranks, **grouped)
            for elements in sizes:
                inputs = make_inputs(schedule, elements)
                tensor = torch.from_numpy(inputs[me].copy())
                run_schedule(schedule, tensor, group, segment_bytes=SEGMENT_BYTES)
                outputs = [tensor.numpy() if rank == me else inputs[rank] for rank in range(ranks)]
                wrong = [
                    chunk for rank, chunk in wrong_chunks(schedule, elements, inputs, outputs) if rank == me
                ]
                assert not wrong, f"{op} by {algorithm}, {ranks} ranks, {elements} elements: chunks {wrong}"
                sent += count_traffic(schedule, elements).sent[me] * tensor.element_size()
    return sent


def check_gradients(group: dist.ProcessGroup) -> None:
    """One runner on tensors of several sizes and dtypes, with messages of other calls between them."""
    ring = ScheduleRunner(build_collective("all_reduce", "ring", group.size()), group, segment_bytes=512)
    right, left = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    for numel, dtype in (
        (1000, torch.float32),
        (5000, torch.float64),
        (77, torch.bfloat16),
        (1000, torch.float32),
    ):
        values = torch.ones(numel, dtype=dtype, requires_grad=True)
        other = torch.empty(1)
        receive = dist.irecv(other, group=group, group_src=left)
        ring(values)
        dist.isend(torch.full((1,), float(numel)), group=group, group_dst=right).wait()
        receive.wait()
        assert other.item() == numel
        assert values.tolist() == [group.size()] * numel


def run_rank(run_dir, listener):
    """One of four ranks, in groups of two, three and four ranks."""
    counter = CollectiveCounter()
    counter.install()
    overrides = [f"layout.dp_replicate={RANKS}", f"cluster.devices_per_node={RANKS}"]
    mesh = init_mesh(load_job(run_dir + "/job.toml", overrides), counter)
    expected = {}
    for size in (2, 3, RANKS):
        group = dist.new_group(list(range(size)))
        if mesh.rank < size:
            counter.name_axis(group, str(size))
            expected[str(size)] = check_schedules(group, SIZES)
    check_gradients(mesh.group("dp_replicate"))
    measured = {row["axis"]: row["bytes"] for row in counter.rows() if row["op"] == "send"}
    listener({"event": "sent", "rank": mesh.rank, "expected": expected, "measured": measured})
    destroy_mesh(mesh)
    return 0


def test_every_schedule_on_two_to_four_ranks(job_file, tmp_path):
    """Results equal the reference; the counter has exactly the bytes that the schedules send."""
    events = []
    Supervisor(f"{__name__}:run_rank", tmp_path, RANKS, 0, 10.0, events.append).run()
    sent = {event["rank"]: event for event in events if event["event"] == "sent"}
    assert sorted(sent) == list(range(RANKS))
    for event in sent.values():
        assert {axis: event["measured"][axis] for axis in event["expected"]} == event["expected"]
