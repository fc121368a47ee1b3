"""Runs on several nodes, in network namespaces: losses, failures of ranks and of agents, and what is left."""

from __future__ import annotations

import json
import os
import signal

import pytest

from meshwright.elastic.faults.processes import Resources
from meshwright.runs.faults.checks.network_nodes import PORT, result_of, wait_until
from s3_server import S3Server

STEPS = ("train.steps=30", "elastic.snapshot_every=5", "checkpoint.every_steps=10")
ONE_EACH = ("layout.dp_replicate=2", "cluster.devices_per_node=1", *STEPS)

ATTACK = """
import os, socket, struct, sys
contents = [b"", os.urandom(64), struct.pack("!I", 2**31), struct.pack("!I", 900) + b"{"]
command = b'{"do": "start", "rank": 0, "entry": "os:system"}'
contents.append(struct.pack("!I", len(command)) + command)
for batch in range(12):
    strangers = []
    for number in range(50):
        stranger = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
        try:
            stranger.sendall(contents[number % len(contents)])
        except OSError:
            pass  # refused: too many at once
        strangers.append(stranger)
    for stranger in strangers:
        stranger.close()
"""
"""600 connections: silence, noise, a huge length, half a message, a command."""


def step_is_done(nodes, step, generation=0):
    def holds():
        nodes.require_no_error()
        return any(
            e["event"] == "step" and e["step"] >= step and e["generation"] == generation
            for e in nodes.events()
        )

    return holds


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
    assert (nodes.folder / "node-1/node-runs/run-node-1/logs" / f"rank-{last_rank}.log").exists()
    assert not list((nodes.run_dir / "checkpoints").glob(".node-check*"))
    nodes.require_empty()


@pytest.mark.slow
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


@pytest.mark.slow
def test_nodes_that_share_nothing_but_an_object_store_go_on_from_its_checkpoint(
    make_nodes, train, job_file, monkeypatch
):
    """The credentials are those of each node's environment. The killed agent's snapshots are lost."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    alone = train(*ONE_EACH, "run_dir=alone")
    nodes = make_nodes(3)
    server = S3Server(nodes.address(0), ("ip", "netns", "exec", nodes.names[0]))
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        nodes.run_dir.mkdir()
        running = nodes.train(job_file, *ONE_EACH, "cluster.nodes=2", "checkpoint.dir=s3://bucket/run")
        first = nodes.join(1, hidden=nodes.run_dir)
        wait_until(step_is_done(nodes, 15))
        kill_agent(first)
        second = nodes.join(2, hidden=nodes.run_dir)
        result = result_of(running)
        assert second.finish()[0] == 0
    finally:
        server.end()
    assert result["losses"] == alone.losses
    assert result["checkpoint"].startswith("s3://bucket/run/step-00000030")
    (recovered,) = [e for e in nodes.events() if e["event"] == "recovered"]
    assert (recovered["source"], recovered["restored_step"]) == ("checkpoint", 10)
    nodes.require_empty()


@pytest.mark.slow
def test_a_run_whose_node_is_lost_ends_and_names_it(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "elastic.policy=give-up")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 5))
    kill_agent(agent)
    status, _, err = running.finish()
    assert status == 4
    assert "the agent of node 1 (host-1) is gone; elastic.policy=give-up ends the run" in err
    assert "[run-node-lost]" in err
    nodes.require_empty()


@pytest.mark.slow
def test_a_run_waits_for_a_lost_node_and_then_ends(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "elastic.node_wait_s=1.5")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 5))
    kill_agent(agent)
    status, _, err = running.finish()
    assert status == 4
    assert "is gone; no other agent joined within elastic.node_wait_s=1.5" in err
    nodes.require_empty()


@pytest.mark.slow
def test_a_node_that_does_not_join_ends_the_run(make_nodes, job_file):
    nodes = make_nodes(2)
    status, _, err = nodes.train(job_file, *ONE_EACH, "elastic.join_timeout_s=1").finish()
    assert status == 4
    assert "1 of 2 nodes joined within elastic.join_timeout_s=1" in err
    assert "[run-nodes-missing]" in err
    nodes.require_empty()


@pytest.mark.slow
def test_a_stopped_rank_of_another_node_is_found(make_nodes, train, job_file):
    """The verdict comes from flight recorders on two machines; the run goes on with another process."""
    alone = train(*ONE_EACH, "run_dir=alone")
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "elastic.heartbeat_timeout_s=3")
    nodes.join(1)
    wait_until(step_is_done(nodes, 8))
    stopped = nodes.rank_pid(1)
    os.kill(stopped, signal.SIGSTOP)
    result = result_of(running)
    assert result["losses"] == alone.losses
    (hang,) = [e for e in nodes.events() if e["event"] == "hang"]
    assert (hang["cause"], hang["rank"], hang["waiting"]) == ("stopped", 1, [0])
    assert 1 < hang["since_s"] < 10
    nodes.require_empty()


@pytest.mark.slow
def test_hostile_connections_do_not_disturb_a_run(make_nodes, job_file):
    """600 strangers at the supervisor's port: nothing is leaked, no rank or node is lost, and steps go on."""
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "checkpoint.every_steps=0")
    nodes.join(1)
    wait_until(step_is_done(nodes, 2))
    assert all(port.startswith("10.77.0.1:") for port in nodes.listening(0)), "the given address only"
    assert all(port.startswith("10.77.0.2:") for port in nodes.listening(1)), "gloo's"
    before = Resources.read(running.process.pid)
    attacker = nodes.run_python(1, ATTACK, nodes.address(0), str(PORT))
    assert attacker.returncode == 0, attacker.stderr
    wait_until(lambda: is_released(running.process.pid, before), 15)
    done = max(e["step"] for e in nodes.events() if e["event"] == "step")
    wait_until(step_is_done(nodes, done + 5))
    assert not [e for e in nodes.events() if e["event"] in ("rank_lost", "node_refused", "hang", "error")]
    assert [e["node"] for e in nodes.events() if e["event"] == "node_joined"] == [1]
    running.process.send_signal(signal.SIGTERM)
    running.finish()
    nodes.require_empty()


def is_released(pid, before):
    """The supervisor holds no more files and sockets than before, and little more memory."""
    now = Resources.read(pid)
    assert now is not None, "the supervisor has ended"
    assert now.rss_bytes - before.rss_bytes < 50e6
    return now.files <= before.files


@pytest.mark.slow
def test_agents_without_the_token_do_not_join(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "elastic.join_timeout_s=60")
    wait_until(nodes.token.exists)
    wrong = nodes.folder / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    join = ("agent", "--join", f"{nodes.address(0)}:{PORT}", "--token-file")
    status, _, err = nodes.start(1, *join, wrong).finish()
    assert (status, "[node-token]" in err) == (2, True), err
    wrong.chmod(0o644)
    status, _, err = nodes.start(1, *join, wrong).finish()
    assert (status, "[token-file-mode]" in err) == (2, True), err
    status, _, err = nodes.start(1, *join, nodes.folder / "none").finish()
    assert (status, "[token-file-missing]" in err) == (2, True), err
    assert running.process.poll() is None, "the run still waits"
    running.process.send_signal(signal.SIGTERM)
    running.finish()
    nodes.require_empty()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "code"), [("run/checkpoints", "node-checkpoints"), ("prepared", "node-data")]
)
def test_a_node_that_does_not_reach_a_folder_is_named(make_nodes, job_file, prepared, hidden, code):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH)
    folder = prepared if hidden == "prepared" else nodes.folder / hidden
    wait_until(folder.exists)
    agent = nodes.join(1, hidden=folder)
    status, _, err = running.finish()
    assert status == 2
    assert "node 1 (host-1)" in err
    assert f"[{code}]" in err
    status, _, err = agent.finish()
    assert (status, f"[{code}]" in err) == (2, True), err
    assert not nodes.run_dir.exists(), "nothing was trained"
    nodes.require_empty()


@pytest.mark.slow
def test_ranks_of_all_nodes_are_adopted(make_nodes, train, job_file):
    """The supervisor is killed. The ranks of both nodes go on, and a new supervisor takes them over."""
    options = (*ONE_EACH, "train.steps=400", "checkpoint.every_steps=0")
    alone = train(*options, "run_dir=alone")
    nodes = make_nodes(2)
    first = nodes.train(job_file, *options)
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 20))
    pids = [nodes.rank_pid(rank) for rank in (0, 1)]
    first.process.kill()
    first.process.wait()
    second = nodes.train(job_file, *options, options=("--resume",))
    result = result_of(second)
    assert result["losses"] == alone.losses
    assert result["audit_ok"], result["differences"]
    assert [nodes.rank_pid(rank) for rank in (0, 1)] == pids, "no rank was restarted"
    assert agent.finish()[0] == 0
    nodes.require_empty()


@pytest.mark.slow
def test_an_adopted_run_survives_the_loss_of_an_agent(make_nodes, train, job_file):
    """After the adoption another agent can join: it gets new ranks."""
    options = (*ONE_EACH, "train.steps=2000", "checkpoint.every_steps=50", "train.eval_samples=4")
    alone = train(*options, "run_dir=alone")
    nodes = make_nodes(3)
    first = nodes.train(job_file, *options, "cluster.nodes=2")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 60))
    first.process.kill()
    first.process.wait()
    second = nodes.train(job_file, *options, "cluster.nodes=2", options=("--resume",))
    wait_until(lambda: sum(e["event"] == "adopted" for e in nodes.events()) == 2)
    kill_agent(agent)
    replacement = nodes.join(2)
    result = result_of(second)
    assert result["losses"] == alone.losses
    assert replacement.finish()[0] == 0
    assert [e["source"] for e in nodes.events() if e["event"] == "recovered"] == ["checkpoint"]
    nodes.require_empty()


@pytest.mark.slow
def test_ranks_without_a_supervisor_save_and_stop(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "elastic.orphan_s=2")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 5))
    running.process.kill()
    status, _, err = agent.finish(60)
    assert (status, "[node-supervisor-lost]" in err) == (4, True), err
    nodes.require_empty(40)
    assert list((nodes.run_dir / "checkpoints").glob("step-*")), "the ranks have saved"


@pytest.mark.slow
def test_a_broken_connection_is_repaired(make_nodes, train, job_file):
    """The cable of node 1 is pulled for 15 s: the run waits for its agent and goes on from the checkpoint."""
    alone = train(*ONE_EACH, "run_dir=alone")
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "elastic.node_wait_s=60")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 12))
    nodes.set_cable(1, connected=False)
    wait_until(lambda: any(e["event"] == "rank_lost" for e in nodes.events()), 30)
    nodes.set_cable(1, connected=True)
    result = result_of(running)
    assert result["losses"] == alone.losses
    assert agent.finish()[0] == 0
    nodes.require_empty()


@pytest.mark.slow
def test_three_nodes_train(make_nodes, train, job_file):
    """Ranks of three machines; one of them dies."""
    layout = ("layout.dp_replicate=3", "train.transport=gloo", *STEPS)  # sums as between nodes
    alone = train(*layout, "run_dir=alone")
    nodes = make_nodes(3)
    running = nodes.train(job_file, *layout, "cluster.devices_per_node=1")
    agents = [nodes.join(1), nodes.join(2)]
    wait_until(step_is_done(nodes, 12))
    os.kill(nodes.rank_pid(1), signal.SIGKILL)
    result = result_of(running)
    assert result["losses"] == alone.losses
    assert result["audit_ok"], result["differences"]
    assert [agent.finish()[0] for agent in agents] == [0, 0]
    assert {e["host"] for e in nodes.events() if e["event"] == "started"} == {"host-0", "host-1", "host-2"}
    nodes.require_empty()


@pytest.mark.slow
def test_a_signal_to_an_agent_stops_the_run_with_a_checkpoint(make_nodes, job_file):
    nodes = make_nodes(2)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 5))
    agent.process.send_signal(signal.SIGTERM)
    status, out, err = running.finish()
    assert (status, json.loads(out)["status"]) == (0, "interrupted"), err
    assert list((nodes.run_dir / "checkpoints").glob("step-*"))
    agent.finish()
    nodes.require_empty()


@pytest.mark.slow
def test_a_spare_takes_over_from_an_agent_that_gets_sigterm(make_nodes, train, job_file):
    """The ranks save, and start again with the spare; no step is repeated. A spare with SIGTERM leaves."""
    options = (*ONE_EACH, "train.schedule=constant", "train.steps=100000", "checkpoint.every_steps=0")
    nodes = make_nodes(4)
    running = nodes.train(job_file, *options, "cluster.nodes=2")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 1))
    spares = [nodes.join(2)]
    wait_until(lambda: any(e["event"] == "node_spare" for e in nodes.events()))
    spares.append(nodes.join(3))
    wait_until(lambda: sum(e["event"] == "node_spare" for e in nodes.events()) == 2)
    spares[0].process.send_signal(signal.SIGTERM)
    assert spares[0].finish()[0] == 0
    wait_until(lambda: any(e["event"] == "spare_lost" for e in nodes.events()))
    agent.process.send_signal(signal.SIGTERM)
    status, _, err = agent.finish()
    assert (status, "has left the run" in err) == (0, True), err
    wait_until(step_is_done(nodes, 2, generation=1))
    running.process.send_signal(signal.SIGTERM)
    result = result_of(running)
    alone = train(*options, f"train.steps={len(result['losses'])}", "run_dir=alone")
    assert result["losses"] == alone.losses
    assert result["audit_ok"], result["differences"]
    assert spares[1].finish()[0] == 0
    (recovered,) = [e for e in nodes.events() if e["event"] == "recovered"]
    assert (recovered["source"], recovered["replayed_steps"]) == ("checkpoint", 0)
    hosts = {e["rank"]: e["host"] for e in nodes.events() if e["event"] == "started"}
    assert hosts == {0: "host-0", 1: "host-3"}
    nodes.require_empty()


@pytest.mark.slow
def test_the_next_spare_takes_over_from_one_that_hangs(make_nodes, job_file):
    """The first spare is stopped and then told to take over: it keeps its connection, and does not answer."""
    nodes = make_nodes(4)
    running = nodes.train(job_file, *ONE_EACH, "train.steps=100000", "cluster.nodes=2")
    agent = nodes.join(1)
    wait_until(step_is_done(nodes, 11))
    hung = nodes.join(2)
    wait_until(lambda: any(e["event"] == "node_spare" for e in nodes.events()))
    other = nodes.join(3)
    wait_until(lambda: sum(e["event"] == "node_spare" for e in nodes.events()) == 2)
    os.kill(hung.process.pid, signal.SIGSTOP)
    kill_agent(agent)
    wait_until(step_is_done(nodes, 12, generation=1))
    (lost,) = [e for e in nodes.events() if e["event"] == "spare_lost"]
    assert (lost["host"], lost["reason"]) == ("host-2", "it sent nothing for 6 s")
    assert [e["host"] for e in nodes.events() if e["event"] == "node_joined"] == ["host-1", "host-3"]
    os.kill(hung.process.pid, signal.SIGCONT)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish()[0] == 0
    assert other.finish()[0] == 0
    hung.finish()
    nodes.require_empty()


@pytest.mark.slow
def test_one_machine_listens_on_loopback_only(make_nodes, job_file):
    """The namespace has no other process: these are all ports of a run without ``--listen``."""
    nodes = make_nodes(1)
    options = ("layout.dp_replicate=2", "train.steps=100000", f"run_dir={nodes.run_dir}")
    running = nodes.start(0, "train", job_file, *options)
    wait_until(step_is_done(nodes, 2))
    assert {port.partition(":")[0] for port in nodes.listening(0)} == {"127.0.0.1"}
    assert nodes.listeners(0) == {nodes.rank_pid(0), nodes.rank_pid(1)}, "gloo's, in the ranks"
    running.process.send_signal(signal.SIGTERM)
    running.finish()
    nodes.require_empty()
