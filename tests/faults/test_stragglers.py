"""A rank that takes longer is named, replaced by policy, and the run ends with the losses of a calm one."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from meshwright.elastic.faults.slow_work import SlowWork, build_slow_library
from meshwright.report.run_report import read_report

pytestmark = pytest.mark.slow

OPTIONS = ("layout.dp_replicate=2", "elastic.snapshot_every=5", "train.steps=160", "data.seq_len=128")


@pytest.fixture
def slow_work(tmp_path, monkeypatch):
    """The table of a run whose ranks can be slowed down."""
    library = build_slow_library(tmp_path)
    if isinstance(library, str):
        pytest.skip(library)
    found = SlowWork(library, tmp_path / "table")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.mark.parametrize("policy", ["warn", "replace"])
def test_a_slow_rank_is_named_and_replaced(command, train, job_file, tmp_path, slow_work, policy):
    run_dir = tmp_path / "run"
    more = (f"run_dir={run_dir}", f"elastic.straggler={policy}", "--json")
    running = command("train", job_file, *OPTIONS, *more)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 30)
    started = {e["rank"]: e["pid"] for e in running.events(run_dir) if e["event"] == "started"}
    slow_work.slow(started[1], 2.5)
    named = running.wait_for(run_dir, lambda e: e["event"] == "straggler")
    assert (named["rank"], named["phase"], named["host"] != "") == (1, "compute", True)
    slow_work.slow(started[1], 1.0)
    status, out, err = running.finish()
    assert status == 0, err
    result = json.loads(out)
    assert result["stragglers"][0]["action"] == ("replace" if policy == "replace" else "none")
    again = [e["pid"] for e in running.events(run_dir) if e["event"] == "started" and e["rank"] == 1]
    assert len(again) == (2 if policy == "replace" else 1)
    if policy == "replace":
        (lost,) = [e for e in running.events(run_dir) if e["event"] == "rank_lost"]
        assert (lost["failed_rank"], lost["how"]) == (1, "a straggler, replaced")
        assert result["stragglers"][0]["recovered_step"] is not None
        assert result["losses"] == train(*OPTIONS, "run_dir=calm").losses
    assert "<h2>Stragglers</h2>" in (run_dir / "report.html").read_text()
    assert any("was a straggler" in note for note in read_report(run_dir).notes())


@pytest.mark.parametrize(("fault", "phase"), [("slow_reads", "data"), ("slow_saves", "storage")])
def test_a_rank_with_slow_data_or_storage_is_named(train, monkeypatch, fault, phase):
    """Reads are late in each step from step 41 on. The fourth late save in a row names the rank."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "multiproc"))
    monkeypatch.setattr("meshwright.runs.train.ENTRY", f"injected_faults:{fault}")
    slow_from = {"data": 41, "storage": 12}[phase]
    saves = ("checkpoint.every_steps=12", "checkpoint.asynchronous=false", "train.steps=80")
    trained = train("layout.dp_replicate=3", "data.seq_len=64", *saves, "run_dir=run")
    events = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    found = [e for e in events if e["event"] == "straggler" and e["phase"] == phase]
    assert [e["rank"] for e in found] == [1]
    assert slow_from - 5 <= found[0]["since_step"], "steps that were slow by chance may come before"
    assert slow_from < found[0]["step"] <= (slow_from + 20 if phase == "data" else 4 * 12 + 1)


def test_a_run_goes_on_without_the_device_of_a_slow_rank(command, train, job_file, tmp_path, slow_work):
    """No step is lost or repeated, and the losses are those of a calm run up to rounding."""
    run_dir = tmp_path / "run"
    more = (f"run_dir={run_dir}", "elastic.straggler=exclude", "elastic.may_change=data", "--json")
    running = command("train", job_file, *OPTIONS, "train.steps=240", *more)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 30)
    started = {e["rank"]: e["pid"] for e in running.events(run_dir) if e["event"] == "started"}
    slow_work.slow(started[1], 2.5)
    changed = running.wait_for(run_dir, lambda e: e["event"] == "layout_changed")
    assert (changed["ranks_before"], changed["ranks"]) == (2, 1)
    assert "rank 1 is a straggler" in changed["reason"]
    status, out, err = running.finish()
    assert status == 0, err
    result = json.loads(out)
    assert result["audit_ok"], result["differences"]
    recovered = running.wait_for(run_dir, lambda e: e["event"] == "recovered")
    assert (recovered["source"], recovered["replayed_steps"]) == ("checkpoint", 0)
    calm = train(*OPTIONS, "train.steps=240", "run_dir=calm").losses
    assert result["losses"] == pytest.approx(calm, rel=1e-5)


def limit_rate(nodes, node, mbit, verb):
    """Let a node send at this rate at most; skip where the kernel cannot."""
    options = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
    command = ["tc", "-n", nodes.names[node], "qdisc", verb, "dev", "net0", "root", "tbf", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"tc: {done.stderr.strip()}")


def test_the_rank_with_a_slow_network_link_is_named(make_nodes, job_file):
    """Three nodes send at 50 Mbit/s, then one of them at 25. All ranks wait alike for it."""
    nodes = make_nodes(3)
    for node in range(3):
        limit_rate(nodes, node, 50, "add")
    options = ("layout.dp_replicate=3", "cluster.devices_per_node=1", "train.steps=100000")
    running = nodes.train(job_file, *options)
    agents = [nodes.join(node) for node in (1, 2)]
    assert slow_links(wait_for_step(nodes, 150)) == []
    limit_rate(nodes, 1, 25, "change")
    slow_since = max(e["step"] for e in nodes.events() if e["event"] == "step")
    (named,) = slow_links(wait_for_step(nodes, slow_since + 24))
    assert named["host"].endswith("(host-1)")
    assert named["step"] <= slow_since + 21
    assert named["slowdown"] > 1.4, "the other links wait for it, and look faster than they are"
    limit_rate(nodes, 1, 50, "change")
    events = wait_for_step(nodes, slow_since + 60)
    assert any(e["event"] == "straggler_recovered" and e["rank"] == named["rank"] for e in events)
    running.process.send_signal(signal.SIGTERM)
    assert running.finish()[0] == 0
    assert [agent.finish()[0] for agent in agents] == [0, 0]


def slow_links(events):
    """Stragglers by communication; on a busy machine a rank may also be late by its CPU."""
    return [e for e in events if e["event"] == "straggler" and e["phase"] == "communication"]


def wait_for_step(nodes, step):
    """Wait until the run has done a step; returns its events."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        events = nodes.events()
        if any(e["event"] == "step" and e["step"] >= step for e in events):
            return events
        time.sleep(0.2)
    pytest.fail(f"step {step} was not reached")


@pytest.mark.timeout(1800)
def test_the_fault_test_of_a_slow_rank_passes(command):
    """500 steps without an alarm; then the slow rank is named within 20 (fault test 8)."""
    running = command("faults", "slow-rank/ddp", "--seed", "1", "--json", "--budget", "3600")
    status, out, err = running.finish(1500)
    assert status == 0, err
    figures = json.loads(out)["figures"]["slow-rank/ddp"]
    assert figures["clean steps"]["value"] >= 500
    assert figures["named after steps"]["value"] <= 20
