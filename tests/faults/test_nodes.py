"""Runs on several nodes, in network namespaces: losses, failures of ranks and of agents, and what is left."""

from __future__ import annotations

import os
import signal

import pytest
from network_nodes import result_of, wait_until

STEPS = ("train.steps=30", "elastic.snapshot_every=5", "checkpoint.every_steps=10")
ONE_EACH = ("layout.dp_replicate=2", "cluster.devices_per_node=1", *STEPS)


def step_is_done(nodes, step, generation=0):
    return lambda: any(
        e["event"] == "step" and e["step"] >= step and e["generation"] == generation for e in nodes.events()
    )


def kill_agent(agent):
    """The command itself: ``ip netns exec`` and ``unshare`` have become it."""
    os.kill(agent.process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("layout", "per_node"),
    [
        pytest.param(("layout.dp_replicate=2",), 1, id="ddp"),
        pytest.param(("layout.pp=2", "layout.tp=2"), 2, id="pp2 tp2", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_node(make_nodes, train, job_file, layout, per_node):
    """Two nodes compute bit by bit what one computes; a killed rank on the other node changes nothing."""
    alone = train(*layout, *STEPS, "run_dir=alone")
    nodes = make_nodes(2)
    running = nodes.train(job_file, *layout, *STEPS, f"cluster.devices_per_node={per_node}")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 12))
    last_rank = 2 * per_node - 1
    os.kill(nodes.rank_pid(last_rank), signal.SIGKILL)
    result = result_of(running)
    assert result["losses"] == alone.losses
    assert result["audit_ok"], result["differences"]
    assert agent.finish()[0] == 0
    (recovered,) = [e for e in nodes.events() if e["event"] == "recovered"]
    assert (recovered["failed_rank"], recovered["source"]) == (last_rank, "snapshot")
    hosts = {e["rank"]: e["host"] for e in nodes.events() if e["event"] == "started"}
    assert hosts == {rank: f"host-{rank // per_node}" for rank in range(2 * per_node)}
    assert (nodes.folder / "node-1/runs/run-node-1/logs" / f"rank-{last_rank}.log").exists()
    assert not list((nodes.run_dir / "checkpoints").glob(".node-check*"))
    nodes.require_empty()


def test_another_agent_replaces_one_that_was_killed(make_nodes, train, job_file):
    """The agent's ranks end, its snapshots are lost, and the run goes on from the newest checkpoint."""
    alone = train(*ONE_EACH, "run_dir=alone")
    nodes = make_nodes(3)
    running = nodes.train(job_file, *ONE_EACH, "cluster.nodes=2", "elastic.node_wait_s=60")
    first = nodes.join(1)
    wait_until(step_is_done(nodes, 12))
    kill_agent(first)
    wait_until(lambda: not nodes.pids(nodes.names[1]), 10)
    second = nodes.join(2)
    result = result_of(running)
    assert result["losses"] == alone.losses
    assert second.finish()[0] == 0
    (recovered,) = [e for e in nodes.events() if e["event"] == "recovered"]
    assert (recovered["source"], recovered["restored_step"]) == ("checkpoint", 10)
    assert recovered["how"] == "the agent of node 1 (host-1) is gone"
    joined = [(e["node"], e["host"]) for e in nodes.events() if e["event"] == "node_joined"]
    assert joined == [(1, "host-1"), (1, "host-2")]
    nodes.require_empty()


def test_a_run_whose_node_is_lost_ends_and_names_it(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "elastic.node_wait_s=0")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 5))
    kill_agent(agent)
    status, _, err = running.finish()
    assert status == 4
    assert "the agent of node 1 (host-1) is gone" in err
    assert "[run-node-lost]" in err
    nodes.require_empty()


def test_a_node_that_does_not_join_ends_the_run(make_nodes, job_file):
    nodes = make_nodes(2)
    status, _, err = nodes.train(job_file, *ONE_EACH, "elastic.join_timeout_s=1").finish()
    assert status == 4
    assert "1 of 2 nodes joined within elastic.join_timeout_s=1" in err
    assert "[run-nodes-missing]" in err
    nodes.require_empty()
