"""Rank placement on two nodes, in network namespaces: losses, hosts, audit, and a node that is replaced."""

from __future__ import annotations

import os
import signal

import pytest

from meshwright.plan.contract import read_plan
from meshwright.runs.faults.checks.network_nodes import result_of, wait_until

LAYOUT = ("layout.tp=2", "layout.dp_replicate=2", "cluster.devices_per_node=2", "train.global_batch=2")
SLOW = ("cluster.nic_bytes_per_s=1e6", "cluster.nic_latency_s=1e-5")
"""Gradients have more bytes than activations, and bytes are slow: replicas belong on one node."""
STEPS = ("train.steps=30", "elastic.snapshot_every=5", "checkpoint.every_steps=10")


@pytest.mark.slow
def test_ranks_train_where_the_plan_places_them_and_a_new_node_takes_the_same_ranks(
    make_nodes, train, job_file
):
    """The losses are those of rank order. The agent of node 1 is killed; another one gets its ranks."""
    ordered = train(*LAYOUT[:2], LAYOUT[3], *STEPS, "layout.placement=rank-order", "run_dir=ordered")
    nodes = make_nodes(3)
    running = nodes.train(job_file, *LAYOUT, *SLOW, *STEPS, "cluster.nodes=2", "elastic.node_wait_s=60")
    first = nodes.join(1)
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 12 for e in nodes.events()), 120)
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: not nodes.pids(nodes.names[1]), 10)
    second = nodes.join(2)
    result = result_of(running)
    assert second.finish()[0] == 0
    assert read_plan(nodes.run_dir / "plan.toml").placement == (0, 2, 1, 3)
    assert result["losses"] == pytest.approx(ordered.losses, rel=1e-5)
    assert result["audit_ok"], result["differences"]
    ready = [e for e in nodes.events() if e["event"] == "ready"]
    newest = max(e["generation"] for e in ready)
    places = [
        {e["rank"]: (e["host"], e["node"], e["device"]) for e in ready if e["generation"] == generation}
        for generation in (0, newest)
    ]
    assert newest > 0
    assert [places[0][rank] for rank in range(4)] == [
        ("host-0", 0, 0),
        ("host-1", 1, 0),
        ("host-0", 0, 1),
        ("host-1", 1, 1),
    ]
    assert [places[1][rank] for rank in range(4)] == [
        ("host-0", 0, 0),
        ("host-2", 1, 0),
        ("host-0", 0, 1),
        ("host-2", 1, 1),
    ]
    nodes.require_empty()


@pytest.mark.slow
def test_another_layout_places_its_ranks_anew(make_nodes, job_file):
    """One of three nodes is lost: the run goes on with four ranks, placed on the two others."""
    layout = ("layout.tp=2", "layout.dp_replicate=3", "cluster.devices_per_node=2", "train.global_batch=6")
    nodes = make_nodes(3)
    running = nodes.train(
        job_file, *layout, *SLOW, *STEPS, "elastic.may_change=data", "elastic.policy=give-up"
    )
    agents = [nodes.join(node) for node in (1, 2)]
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 12 for e in nodes.events()), 120)
    os.kill(agents[0].process.pid, signal.SIGKILL)
    result = result_of(running)
    assert result["audit_ok"], result["differences"]
    (changed,) = [e for e in nodes.events() if e["event"] == "layout_changed"]
    joined = {e["host"]: e["node"] for e in nodes.events() if e["event"] == "node_joined"}
    kept = joined["host-2"]
    assert {node for node, _ in changed["placement"]} == {0, kept}
    ready = {e["rank"]: e for e in nodes.events() if e["event"] == "ready" and e["generation"] > 0}
    assert [[ready[rank]["node"], ready[rank]["device"]] for rank in range(4)] == changed["placement"]
    plan = read_plan(nodes.run_dir / "plan.toml")
    left = [[0, 0], [0, 1], [kept, 0], [kept, 1]]
    assert changed["placement"] == [left[slot] for slot in plan.placement or range(4)]
