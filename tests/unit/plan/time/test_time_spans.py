"""Which nodes the groups of placed ranks cover, and how many network interfaces their rings use."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.time.network import list_degrees, span_of_stride
from meshwright.plan.time.spans import find_spans, needs_spans
from meshwright.plan.time.step import predict_step
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legality.table import with_layout


def place(make_job, slots, nodes=2, per_node=2, device="cpu", rack=None, **degrees):
    """The spans of one placement."""
    job = make_job(cluster={"nodes": 8, "nodes_per_rack": 4})
    cluster = dataclasses.replace(
        job.cluster, device=device, nodes=nodes, devices_per_node=per_node, nodes_per_rack=rack
    )
    job = dataclasses.replace(with_layout(job, Layout("given", **degrees)), cluster=cluster)
    return job, find_spans(job, slots)


def test_spans_in_rank_order_are_those_of_strides(make_job):
    """Where nodes and racks divide groups evenly, the search's closed form and the ranks agree."""
    compared = 0
    for degrees in itertools.product((1, 2, 4), repeat=5):
        layout = Layout("given", **dict(zip(AXES, degrees, strict=True)))
        if layout.world_size > 32:
            continue
        layout = dataclasses.replace(layout, ep=2 if layout.dp_shard * layout.cp * layout.tp > 1 else 1)
        for device, per_node, rack in (("cpu", 8, None), ("cuda", 4, 2)):
            slots, keys = np.arange(layout.world_size), dataclasses.asdict(layout)
            keys = {name: keys[name] for name in (*AXES, "ep")}
            job, spans = place(make_job, slots, 64 // per_node, per_node, device, rack, **keys)
            assert not needs_spans(job)
            for name, (ranks, stride) in list_degrees(Grid.of([layout])).items():
                if ranks[0] == 1:
                    continue
                expected = span_of_stride(job.cluster, ranks, stride, np.array([layout.world_size]))
                found = spans[name]
                assert (found.nodes, found.between_racks) == (expected.nodes, expected.between_racks)
                if expected.nodes > 1:
                    assert (found.ranks_per_node, found.nics) == (expected.ranks_per_node, expected.nics)
                compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("device", "slots", "nics"),
    [
        ("cpu", [0, 1, 2, 3], 2.0),  # the ring leaves each node once: the whole interface
        ("cpu", [0, 2, 1, 3], 1.0),  # it leaves each node twice
        ("cpu", [0, 3, 2, 1], 2.0),  # once, too
        ("cuda", [0, 1, 2, 3], 2.0),
        ("cuda", [0, 2, 1, 3], 2.0),  # NCCL orders its rings by node
    ],
)
def test_rings_of_gloo_follow_rank_order_and_share_the_interface_of_a_node(make_job, device, slots, nics):
    _, spans = place(make_job, slots, device=device, dp_replicate=4)
    assert spans["replicate"].nics == nics
    assert spans["replicate"].ranks_per_node == 2


def test_axes_cross_nodes_as_ranks_are_placed(make_job):
    _, spans = place(make_job, [[0, 1, 2, 3], [0, 2, 1, 3]], tp=2, dp_replicate=2)
    assert spans["tp"].nodes.tolist() == [1, 2]
    assert spans["replicate"].nodes.tolist() == [2, 1]


def test_one_group_that_crosses_nodes_is_the_worst(make_job):
    """Nodes of three devices: the second of three tensor parallel pairs crosses."""
    job, spans = place(make_job, range(6), per_node=3, device="cuda", tp=2, dp_replicate=3)
    assert needs_spans(job)
    assert (spans["tp"].nodes, spans["tp"].ranks_per_node, spans["tp"].nics) == (2, 1, 1)


def test_groups_cross_racks_by_the_nodes_of_their_ranks(make_job):
    nodes = {"nodes": 4, "per_node": 1, "rack": 2, "device": "cuda"}
    _, spans = place(make_job, [[0, 1, 2, 3], [0, 2, 1, 3]], pp=2, dp_replicate=2, **nodes)
    assert spans["replicate"].between_racks.tolist() == [False, True]
    assert spans["pp"].between_racks.tolist() == [True, False]


def test_predicted_step_knows_which_axis_crosses_nodes(make_job):
    job = make_job(
        cluster={"nodes": 2, "devices_per_node": 2}, layout={"tp": 2, "dp_replicate": 2, "micro_batch": 1}
    )
    inside, across = (predict_step(job, 4, slots=slots) for slots in ((), (0, 2, 1, 3)))
    assert across.parts["tensor parallel"] > inside.parts["tensor parallel"]
    assert across.parts["gradient reduction"] < inside.parts["gradient reduction"]
