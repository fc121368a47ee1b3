"""Collective schedules on real ranks, over gloo: results, and bytes in the collective counter."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from collective_ranks import check_counts, run_groups
from collective_reference import make_inputs
from meshwright.elastic.supervisor import Supervisor
from meshwright.parallel.collective_interpreter import ScheduleRunner
from meshwright.schedule.collective.build import build_collective, list_algorithms

RANKS = 4


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


def check_batches(group: dist.ProcessGroup) -> None:
    """One batch per step, as on NCCL, gives the same."""
    for algorithm in list_algorithms("all_reduce"):
        grouped = {"ranks_per_node": 2} if algorithm == "hierarchical" else {}
        schedule = build_collective("all_reduce", algorithm, group.size(), **grouped)
        for elements in (3, 1001):
            inputs = make_inputs(schedule, elements)
            tensor = torch.from_numpy(inputs[group.rank()].copy())
            ScheduleRunner(schedule, group, run_ahead=False)(tensor)
            assert np.array_equal(tensor.numpy(), sum(inputs)), algorithm


def check_more(group: dist.ProcessGroup) -> None:
    check_gradients(group)
    check_batches(group)


def run_rank(run_dir, listener):
    """One of four ranks, in groups of two, three and four ranks."""
    overrides = [f"layout.dp_replicate={RANKS}", f"cluster.devices_per_node={RANKS}"]
    return run_groups(overrides, run_dir, listener, check_more)


def test_every_schedule_on_two_to_four_ranks(job_file, tmp_path):
    """Results equal the reference; the counter has exactly the bytes that the schedules send."""
    events = []
    Supervisor(f"{__name__}:run_rank", tmp_path, RANKS, 0, 10.0, events.append).run()
    check_counts(events, RANKS)
