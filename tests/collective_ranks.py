"""Collective schedules on real ranks, on CPUs and GPUs: results, and bytes in the collective counter."""

from __future__ import annotations

import torch
import torch.distributed as dist

from collective_reference import make_inputs, wrong_chunks
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.collective_interpreter import run_schedule
from meshwright.parallel.mesh import destroy_mesh, init_mesh
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.traffic import count_traffic
from meshwright.spec.load import load_job

SIZES = (3, 10_007)
SEGMENT_BYTES = 8192


def check_schedules(group: dist.ProcessGroup, device: torch.device, sizes: tuple[int, ...] = SIZES) -> int:
    """Every operation by every algorithm on one group. Returns the bytes that this rank must have sent."""
    ranks, me, sent = group.size(), group.rank(), 0
    for op in Op:
        for algorithm in list_algorithms(op):
            grouped = {"ranks_per_node": 2} if algorithm == "hierarchical" else {}
            schedule = build_collective(op, algorithm, ranks, **grouped)
            for elements in sizes:
                inputs = make_inputs(schedule, elements)
                tensor = torch.tensor(inputs[me], device=device)
                run_schedule(schedule, tensor, group, segment_bytes=SEGMENT_BYTES)
                outputs = [tensor.cpu().numpy() if rank == me else inputs[rank] for rank in range(ranks)]
                wrong = [
                    chunk for rank, chunk in wrong_chunks(schedule, elements, inputs, outputs) if rank == me
                ]
                assert not wrong, f"{op} by {algorithm}, {ranks} ranks, {elements} elements: chunks {wrong}"
                sent += count_traffic(schedule, elements).sent[me] * tensor.element_size()
    return sent


def run_groups(overrides: list[str], run_dir: str, listener, more) -> int:
    """One of four ranks: all schedules in groups of two, three and four ranks, and what else is given."""
    counter = CollectiveCounter()
    counter.install()
    mesh = init_mesh(load_job(run_dir + "/job.toml", overrides), counter)
    expected = {}
    for size in range(2, mesh.world_size + 1):
        group = dist.new_group(list(range(size)))
        if mesh.rank < size:
            counter.name_axis(group, str(size))
            expected[str(size)] = check_schedules(group, mesh.device)
    more(mesh.group("dp_replicate"))
    measured = {row["axis"]: row["bytes"] for row in counter.rows() if row["op"] == "send"}
    listener({"event": "sent", "rank": mesh.rank, "expected": expected, "measured": measured})
    destroy_mesh(mesh)
    return 0


def check_counts(events, ranks: int) -> None:
    """The counter of every rank has exactly the bytes that the schedules send."""
    sent = {event["rank"]: event for event in events if event["event"] == "sent"}
    assert sorted(sent) == list(range(ranks))
    for event in sent.values():
        assert {axis: event["measured"][axis] for axis in event["expected"]} == event["expected"]
