"""Runs that go on in another layout: a device or a node is lost, and comes back."""

from __future__ import annotations

import json
import os
import signal

import pytest

from meshwright.elastic.faults.invariants import check_checkpoints, read_history
from meshwright.runs.faults.checks.network_nodes import result_of, wait_until

TOLERANCE = 1e-5
"""Relative difference of a loss from that of the undisturbed run, in float32."""
GLOBAL_BATCH = 12
"""Of the small job."""
ENDLESS = ("train.steps=100000", "train.schedule=constant", "train.lr=3e-4")
"""The loss of a step does not depend on the number of steps. With a larger learning rate, rounding grows to
1e-3 of the loss in 200 steps."""
EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_size=64")


def kill_until_left_out(running, run_dir, rank, step):
    """Kill a rank, and its replacement before it does a new step: its device then counts as broken."""

    def is_started(event):
        return event["event"] == "started" and event["rank"] == rank and event["pid"] not in killed

    killed = set()
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == step)
    while not any(e["event"] == "layout_changed" for e in running.events(run_dir)):
        for event in running.events(run_dir):
            if is_started(event):
                killed.add(event["pid"])
                os.kill(event["pid"], signal.SIGKILL)
    assert len(killed) == 2, "the second failure in a row leaves the device out"


def require_equal(found, expected):
    """Every step once, with the loss of the undisturbed run."""
    assert len(found) == len(expected)
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    assert worst <= TOLERANCE, f"relative difference {worst:.1e}"


def stop(running):
    """Let a run end after its step; returns its result."""
    running.process.send_signal(signal.SIGTERM)
    status, out, err = running.finish()
    assert status == 0, err
    return json.loads(out)


def require_ledger(running, run_dir):
    """Each step was committed once, and each sample used exactly once."""
    assert read_history(running.events(run_dir)).violations == ()
    assert check_checkpoints(run_dir / "checkpoints", GLOBAL_BATCH) == []


def changes_of(running, run_dir):
    events = [e for e in running.events(run_dir) if e["event"] == "layout_changed"]
    return [(e["ranks_before"], e["ranks"]) for e in events]


def steps_since_change(events, changes):
    """Whether a step was done after this number of changes."""
    generations = [e["generation"] for e in events if e["event"] == "layout_changed"]
    if len(generations) < changes:
        return False
    last = generations[changes - 1]
    return any(e["event"] == "step" and e["generation"] > last for e in events)


def kill_agent(agent):
    os.kill(agent.process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("layout", "may_change", "sizes"),
    [
        pytest.param(("layout.dp_replicate=4",), "data", [(4, 3), (3, 4)], id="ddp"),
        pytest.param(("layout.dp_shard=4",), "data", [(4, 3), (3, 4)], id="zero3", marks=pytest.mark.slow),
        pytest.param(
            ("layout.pp=2", "layout.tp=2"), "any", [(4, 3), (3, 4)], id="pp2 tp2", marks=pytest.mark.slow
        ),
        pytest.param(
            ("layout.dp_shard=4", "layout.ep=4", *EXPERTS),
            "data",
            [(4, 3), (3, 4)],
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_without_a_broken_device_and_uses_it_again(
    command, train, job_file, tmp_path, layout, may_change, sizes
):
    """From snapshots of the other layout: all losses, each sample once, and an audit of every layout."""
    options = (*layout, *ENDLESS, "cluster.devices_per_node=4")
    elastic = (
        f"elastic.may_change={may_change}",
        "elastic.restarts=1",
        "elastic.snapshot_every=10",
        "elastic.retry_device_s=2",
        "elastic.grow_after_s=0",
        "elastic.stop_grace_s=3",
    )
    run_dir = tmp_path / "run"
    running = command("train", job_file, *options, *elastic, f"run_dir={run_dir}", "--json")
    kill_until_left_out(running, run_dir, rank=2, step=19)
    wait_until(lambda: steps_since_change(running.events(run_dir), 2))
    result = stop(running)
    undisturbed = train(*options, f"train.steps={len(result['losses'])}", "run_dir=calm")
    require_equal(result["losses"], undisturbed.losses)
    assert result["audit_ok"], result["differences"]
    assert changes_of(running, run_dir) == sizes
    first, back = [e for e in running.events(run_dir) if e["event"] == "recovered"][-2:]
    assert first["source"] == "snapshot"
    assert first["restored_step"] in (10, 20), "the last snapshot before the kill"
    resharded = [e["rank"] for e in running.events(run_dir) if e["event"] == "resharded"]
    assert sorted(resharded) == list(range(sizes[0][1])), "every rank has read snapshots of the other layout"
    assert (back["source"], back["replayed_steps"], back["failed_rank"]) == ("checkpoint", 0, None)
    require_ledger(running, run_dir)
    assert sorted(path.name for path in run_dir.glob("plan*.toml"))[-1] == "plan.toml"
    assert len(list(run_dir.glob("plan-*.toml"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "per_node", "sizes", "source"),
    [
        pytest.param(("layout.dp_replicate=4",), 1, [(4, 3), (3, 4)], "snapshot", id="4 ranks, ddp"),
        pytest.param(("layout.dp_shard=4",), 1, [(4, 3), (3, 4)], "checkpoint", id="4 ranks, zero3"),
        pytest.param(
            ("layout.pp=2", "layout.tp=2", "layout.dp_replicate=2"),
            2,
            [(8, 6), (6, 8)],
            "checkpoint",
            id="8 ranks, pp2 tp2",
        ),
        pytest.param(
            ("layout.dp_shard=4", "layout.ep=4", *EXPERTS),
            1,
            [(4, 3), (3, 4)],
            "checkpoint",
            id="4 ranks, experts",
        ),
    ],
)
def test_a_run_goes_on_without_a_lost_node_and_uses_it_again(
    make_nodes, train, job_file, layout, per_node, sizes, source
):
    """A replica of the state on every node is restored from its snapshots; otherwise the checkpoint is."""
    options = (*layout, *ENDLESS, "elastic.snapshot_every=5", "checkpoint.every_steps=10")
    nodes = make_nodes(4)
    running = nodes.train(
        job_file,
        *options,
        f"cluster.devices_per_node={per_node}",
        "elastic.may_change=any",
        "elastic.node_wait_s=0.5",
        "elastic.grow_after_s=0.2",
    )
    agents = [nodes.join(node) for node in (1, 2, 3)]
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 12 for e in nodes.events()))
    kill_agent(agents[1])
    wait_until(lambda: steps_since_change(nodes.events(), 1))
    nodes.join(2)
    wait_until(lambda: steps_since_change(nodes.events(), 2))
    result = stop(running)
    calm = (f"train.steps={len(result['losses'])}", f"cluster.devices_per_node={4 * per_node}")
    undisturbed = train(*options, *calm, "run_dir=calm")
    require_equal(result["losses"], undisturbed.losses)
    assert result["audit_ok"], result["differences"]
    assert changes_of(running, nodes.run_dir) == sizes
    first = next(e for e in nodes.events() if e["event"] == "recovered")
    assert first["source"] == source
    require_ledger(running, nodes.run_dir)
    nodes.require_empty()


@pytest.mark.slow
def test_a_run_waits_for_the_devices_that_its_smallest_layout_needs(make_nodes, train, job_file):
    """One of two nodes has half of a pipeline. The event has the number of devices that would do."""
    options = ("layout.pp=3", "model.num_layers=3", "train.steps=40", "checkpoint.every_steps=5")
    undisturbed = train(*options, "run_dir=calm", "cluster.devices_per_node=3")
    nodes = make_nodes(3)
    running = nodes.train(
        job_file,
        *options,
        "cluster.devices_per_node=1",
        "elastic.may_change=data",
        "elastic.node_wait_s=0.5",
    )
    agents = [nodes.join(node) for node in (1, 2)]
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 7 for e in nodes.events()))
    kill_agent(agents[1])
    wait_until(lambda: any(e["event"] == "waiting_for_devices" for e in nodes.events()))
    (waiting,) = [e for e in nodes.events() if e["event"] == "waiting_for_devices"]
    assert "3 devices would do" in waiting["missing"]
    nodes.join(2)
    result = result_of(running)
    assert result["losses"] == undisturbed.losses
    assert changes_of(running, nodes.run_dir) == []


@pytest.mark.slow
def test_a_run_that_gives_up_says_how_many_devices_it_needs(make_nodes, job_file):
    nodes = make_nodes(3)
    running = nodes.train(
        job_file,
        "layout.pp=3",
        "model.num_layers=3",
        "train.steps=100000",
        "cluster.devices_per_node=1",
        "elastic.may_change=data",
        "elastic.policy=give-up",
    )
    agents = [nodes.join(node) for node in (1, 2)]
    wait_until(lambda: any(e["event"] == "step" for e in nodes.events()))
    kill_agent(agents[1])
    status, _, err = running.finish()
    assert status == 4
    assert "3 devices would do" in err
    nodes.require_empty()


@pytest.mark.slow
def test_a_killed_command_is_adopted_in_the_layout_that_its_ranks_have(command, job_file, tmp_path):
    """The ranks go on with three devices, and the new command uses the fourth again."""
    run_dir = tmp_path / "run"
    options = (
        "layout.dp_replicate=4", "cluster.devices_per_node=4", "train.steps=3000", "elastic.may_change=data",
        "elastic.restarts=1", "elastic.snapshot_every=10", "elastic.stop_grace_s=3", "elastic.grow_after_s=0",
        "elastic.retry_device_s=0", "checkpoint.every_steps=1000", f"run_dir={run_dir}",
    )  # fmt: skip
    running = command("train", job_file, *options)
    kill_until_left_out(running, run_dir, rank=2, step=19)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["generation"] == 2)
    running.process.kill()
    running.process.wait()
    again = command("train", job_file, f"run_dir={run_dir}", "--resume", "--json")
    again.wait_for(run_dir, lambda e: e["event"] == "adopted")
    wait_until(lambda: len(changes_of(again, run_dir)) == 2)
    again.wait_for(run_dir, lambda e: e["event"] == "step" and e["generation"] == 3)
    again.process.send_signal(signal.SIGTERM)
    status, out, err = again.finish()
    assert status == 0, err
    assert changes_of(again, run_dir) == [(4, 3), (3, 4)]
    assert json.loads(out)["audit_ok"], json.loads(out)["differences"]
    require_ledger(again, run_dir)


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_whose_agent_gets_sigterm(make_nodes, train, job_file):
    """The ranks save after their step and go on in a smaller layout; no step is repeated."""
    options = ("layout.dp_shard=3", *ENDLESS, "elastic.snapshot_every=5", "checkpoint.every_steps=0")
    nodes = make_nodes(3)
    running = nodes.train(job_file, *options, "cluster.devices_per_node=1", "elastic.may_change=data")
    agents = [nodes.join(node) for node in (1, 2)]
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 7 for e in nodes.events()))
    agents[0].process.send_signal(signal.SIGTERM)
    status, _, err = agents[0].finish()
    assert (status, "has left the run" in err) == (0, True), err
    wait_until(lambda: steps_since_change(nodes.events(), 1))
    result = stop(running)
    assert agents[1].finish()[0] == 0
    calm = (f"train.steps={len(result['losses'])}", "cluster.devices_per_node=3")
    require_equal(result["losses"], train(*options, *calm, "run_dir=calm").losses)
    assert result["audit_ok"], result["differences"]
    assert changes_of(running, nodes.run_dir) == [(3, 2)]
    (recovered,) = [e for e in nodes.events() if e["event"] == "recovered"]
    assert (recovered["source"], recovered["replayed_steps"]) == ("checkpoint", 0)
    require_ledger(running, nodes.run_dir)
    nodes.require_empty()


@pytest.mark.slow
def test_ranks_of_several_nodes_are_adopted_in_a_changed_layout(make_nodes, train, job_file):
    """The command is killed while three of four nodes train. The new one adopts them, and uses the fourth."""
    options = ("layout.dp_replicate=4", *ENDLESS, "elastic.snapshot_every=5", "checkpoint.every_steps=0")
    elastic = ("elastic.may_change=data", "elastic.node_wait_s=0.5", "elastic.grow_after_s=0.2")
    nodes = make_nodes(4)
    first = nodes.train(job_file, *options, *elastic, "cluster.devices_per_node=1")
    agents = [nodes.join(node) for node in (1, 2, 3)]
    wait_until(lambda: any(e["event"] == "step" and e["step"] >= 7 for e in nodes.events()))
    kill_agent(agents[1])
    wait_until(lambda: steps_since_change(nodes.events(), 1))
    pids = [nodes.rank_pid(rank) for rank in range(3)]
    first.process.kill()
    first.process.wait()
    again = nodes.train(job_file, *options, *elastic, "cluster.devices_per_node=1", options=("--resume",))
    wait_until(lambda: sum(e["event"] == "adopted" for e in nodes.events()) == 3)
    done = max(e["step"] for e in nodes.events() if e["event"] == "step")
    wait_until(lambda: any(e["event"] == "step" and e["step"] > done for e in nodes.events()))
    assert [nodes.rank_pid(rank) for rank in range(3)] == pids, "no rank was restarted"
    assert changes_of(again, nodes.run_dir) == [(4, 3)]
    nodes.join(2)
    wait_until(lambda: steps_since_change(nodes.events(), 2))
    result = stop(again)
    calm = (f"train.steps={len(result['losses'])}", "cluster.devices_per_node=4")
    require_equal(result["losses"], train(*options, *calm, "run_dir=calm").losses)
    assert result["audit_ok"], result["differences"]
    assert changes_of(again, nodes.run_dir) == [(4, 3), (3, 4)]
    require_ledger(again, nodes.run_dir)
    nodes.require_empty()


@pytest.mark.slow
def test_ranks_are_adopted_while_the_node_of_the_command_is_idle(make_nodes, job_file):
    """The device of node 0 is left out, and the command is killed: ``--resume`` starts no other ranks."""
    options = (
        "layout.dp_replicate=3", *ENDLESS, "cluster.devices_per_node=1", "elastic.may_change=data",
        "elastic.restarts=1", "elastic.snapshot_every=5", "elastic.grow_after_s=100000",
    )  # fmt: skip
    nodes = make_nodes(3)
    first = nodes.train(job_file, *options)
    agents = [nodes.join(node) for node in (1, 2)]
    kill_until_left_out(first, nodes.run_dir, rank=0, step=7)
    wait_until(lambda: steps_since_change(nodes.events(), 1))
    started = [e["pid"] for e in nodes.events() if e["event"] == "started"]
    assert {e["host"] for e in nodes.events() if e["event"] == "started"} >= {"host-1", "host-2"}
    first.process.kill()
    first.process.wait()
    again = nodes.train(job_file, *options, options=("--resume",))
    wait_until(lambda: sum(e["event"] == "adopted" for e in nodes.events()) == 3)
    done = max(e["step"] for e in nodes.events() if e["event"] == "step")
    wait_until(lambda: any(e["event"] == "step" and e["step"] > done for e in nodes.events()))
    result = stop(again)
    assert result["audit_ok"], result["differences"]
    assert [e["pid"] for e in nodes.events() if e["event"] == "started"] == started, "no rank was started"
    assert [agent.finish()[0] for agent in agents] == [0, 0]
    nodes.require_empty()
