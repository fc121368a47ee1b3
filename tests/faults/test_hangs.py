"""Hangs of real ranks: a wrong or missing call, no data, no storage, a stopped process. Each is named."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from meshwright.core.events import read_events

TWO = "layout.dp_replicate=2"
LONG = ("train.steps=100000", TWO)
NAMED_WITHIN_S = 15.0
"""The default of ``elastic.heartbeat_timeout_s`` is 5 s; the rest is for a busy machine."""


@pytest.fixture(autouse=True)
def _injected_faults_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "multiproc"))


@pytest.fixture
def fail(train, monkeypatch):
    """Train with an injected fault; returns the error and the ``hang`` events."""

    def run(fault, *options):
        monkeypatch.setattr("meshwright.runs.train.ENTRY", f"injected_faults:{fault}")
        failed = train(*(options or (TWO,)), expect=4)
        (error,) = failed.result["errors"]
        return error, read_events(failed.run_dir / "events.jsonl").of("hang")

    return run


def test_a_skipped_collective_ends_the_run_and_is_named(fail):
    """Rank 1 skips a call that it made in every step before. Both ranks then wait for each other."""
    error, (event,) = fail("skipped_all_reduce_in_step_4")
    assert error["code"] == "run-hang"
    assert event["verdict"] in error["message"]
    assert (event["cause"], event["rank"], event["step"]) == ("skipped", 1, 4)
    assert (event["axis"], event["op"]) == ("dp_replicate", "all_reduce")
    assert "injected_faults.py" in event["verdict"]
    assert event["since_s"] < NAMED_WITHIN_S


@pytest.mark.parametrize(
    "fault", ["other_shape_in_step_4", pytest.param("other_op_in_step_4", marks=pytest.mark.slow)]
)
def test_a_mismatched_call_is_named_with_its_source_line(fail, fault):
    """Gloo aborts, raises or hangs. In all cases the error has rank, collective and source line."""
    error, (event,) = fail(fault, "layout.dp_replicate=3")
    assert error["code"] in ("run-hang", "run-rank-died")
    assert (event["cause"], event["rank"]) == ("mismatch", 1)
    assert event["verdict"] in error["message"]
    assert "rank 1 called all_" in error["message"]
    assert "of dp_replicate" in error["message"]
    assert "injected_faults.py:" in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause", "rank", "options"),
    [
        ("stuck_in_data_in_step_4", "data", 1, ()),
        ("stuck_in_checkpoint", "storage", 0, ("checkpoint.every_steps=2",)),
        ("blocked_in_step_4", "blocked", 1, ()),
    ],
)
def test_a_rank_that_waits_outside_of_collectives_is_named_and_the_run_is_not_ended_for_it(
    fail, fault, cause, rank, options
):
    """It may continue by itself. Only the timeout of the waiting collective ends the run."""
    limits = ("elastic.collective_timeout_s=15", "elastic.restarts=0")
    error, (event,) = fail(fault, TWO, *limits, *options)
    assert error["code"] == "run-rank-died"
    assert event["verdict"] in error["message"]
    assert (event["cause"], event["rank"]) == (cause, rank)
    assert event["waiting"] == [1 - rank]
    assert event["op"] == "all_reduce"
    assert event["since_s"] < NAMED_WITHIN_S


def test_a_stopped_rank_is_named_and_replaced(command, job_file, tmp_path):
    """SIGSTOP. ``meshwright hang`` names the rank before the supervisor does, which then replaces it."""
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", "elastic.heartbeat_timeout_s=8")
    victim = running.wait_for(run_dir, lambda e: e["event"] == "started" and e["rank"] == 1)["pid"]
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    os.kill(victim, signal.SIGSTOP)
    status, out, err = command("hang", str(run_dir), "--json").finish()
    assert status == 0, err
    asked = json.loads(out)
    assert (asked["hangs"], asked["cause"], asked["rank"]) == (True, "stopped", 1)
    assert asked["axis"] in ("dp_replicate", "control"), "rank 1 is stopped anywhere in its step"
    assert (asked["op"], asked["waiting"]) == ("all_reduce", [0])
    event = running.wait_for(run_dir, lambda e: e["event"] == "hang")
    assert (event["cause"], event["rank"]) == ("stopped", 1)
    assert event["since_s"] < NAMED_WITHIN_S
    recovered = running.wait_for(run_dir, lambda e: e["event"] == "recovered")
    assert recovered["failed_rank"] == 1
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["generation"] == 1)
    running.process.send_signal(signal.SIGQUIT)
    assert any("no rank is stuck" in line for line in running.process.stderr), "SIGQUIT is answered"
    running.process.send_signal(signal.SIGINT)
    status, _, err = running.finish()
    assert status == 130, err
    status, _, err = command("hang", str(run_dir)).finish()
    assert (status, "[hang-not-running]" in err) == (2, True)


@pytest.mark.slow
def test_a_stopped_rank_ends_a_run_without_restarts(command, job_file, tmp_path):
    run_dir = tmp_path / "run"
    running = command("train", job_file, *LONG, f"run_dir={run_dir}", "elastic.restarts=0")
    victim = running.wait_for(run_dir, lambda e: e["event"] == "started" and e["rank"] == 1)["pid"]
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    os.kill(victim, signal.SIGSTOP)
    event = running.wait_for(run_dir, lambda e: e["event"] == "hang")
    status, _, err = running.finish()
    assert status == 4
    assert "[run-hang]" in err
    assert event["verdict"] in err


@pytest.mark.slow
def test_a_jumping_clock_changes_nothing(train, monkeypatch):
    """Ages are measured by the launcher's monotonic clock. Losses are those of a run without the jump."""
    expected = train(TWO).losses
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:jumping_clock")
    jumped = train(TWO)
    assert jumped.losses == expected
    assert not read_events(jumped.run_dir / "events.jsonl").of("hang")


@pytest.mark.slow
def test_long_compute_and_evaluation_are_no_hang(train, monkeypatch):
    """One rank computes for more than twice the timeout while the other waits for it."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:busy_for_seconds")
    done = train(TWO, "elastic.heartbeat_timeout_s=3")
    assert not read_events(done.run_dir / "events.jsonl").of("hang")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TWO, "layout.pp=2"])
def test_no_verdict_in_500_clean_steps(train, layout):
    done = train(layout, "train.steps=500", "train.eval_every=50", "checkpoint.every_steps=100")
    assert not read_events(done.run_dir / "events.jsonl").of("hang")
