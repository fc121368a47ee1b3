"""A rank is killed, and the run goes on in the same processes. Losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from meshwright import load_run
from saved_checkpoints import require_equal_files

STEPS = ("train.steps=60", "elastic.snapshot_every=5", "train.eval_every=20", "checkpoint.every_steps=20")
LAYOUTS = [
    pytest.param(("layout.dp_replicate=2",), id="ddp"),
    pytest.param(("layout.dp_replicate=2", "train.transport=gloo"), id="ddp over gloo"),
    pytest.param(("layout.dp_shard=2",), id="zero3", marks=pytest.mark.slow),
    pytest.param(("layout.dp_replicate=4",), id="ddp4", marks=pytest.mark.slow),
    pytest.param(("layout.dp_shard=4",), id="zero3x4", marks=pytest.mark.slow),
    pytest.param(
        ("layout.dp_shard=4", "train.transport=gloo"), id="zero3x4 over gloo", marks=pytest.mark.slow
    ),
    pytest.param(("layout.pp=2", "layout.tp=2"), id="pp2 tp2", marks=pytest.mark.slow),
    pytest.param(
        ("layout.dp_shard=2", "layout.ep=2", "model.num_experts=4", "model.experts_per_token=2"),
        id="moe",
        marks=pytest.mark.slow,
    ),
]


def last_pid(running, run_dir, rank):
    return [e["pid"] for e in running.events(run_dir) if e["event"] == "started" and e["rank"] == rank][-1]


def kill_at(running, run_dir, rank, step, generation=0):
    """SIGKILL a rank when rank 0 has written a step."""
    running.wait_for(
        run_dir,
        lambda e: (
            e["event"] == "step" and e["step"] == step and (e["rank"], e["generation"]) == (0, generation)
        ),
    )
    os.kill(last_pid(running, run_dir, rank), signal.SIGKILL)


def result_of(running):
    status, out, err = running.finish()
    assert status == 0, err
    return json.loads(out)


def steps_of(events, rank):
    return {(e["generation"], e["step"]) for e in events if e["event"] == "step" and e["rank"] == rank}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_bit_identical_after_a_kill(command, train, job_file, tmp_path, layout):
    """Only killed processes are replaced. Losses, audit and checkpoint are those of a calm run."""
    undisturbed = train(*layout, *STEPS, "run_dir=calm")
    run_dir = tmp_path / "run"
    running = command("train", job_file, *layout, *STEPS, f"run_dir={run_dir}", "--json")
    kill_at(running, run_dir, rank=1, step=23)
    kill_at(running, run_dir, rank=0, step=41, generation=1)
    result = result_of(running)
    assert result["losses"] == undisturbed.losses
    assert result["audit_ok"], result["differences"]
    events = running.events(run_dir)
    recovered = [e for e in events if e["event"] == "recovered"]
    assert [e["failed_rank"] for e in recovered] == [1, 0]
    assert all(e["source"] == "snapshot" for e in recovered)
    assert all(e["how"] == "killed by SIGKILL" for e in recovered)
    for event in recovered:
        parts = [event[f"{part}_s"] for part in ("halt", "decide", "start", "join", "rebuild", "load")]
        assert min(parts) > 0, event
        assert sum(parts) <= event["seconds"], "the parts are parts of the whole"
        assert event["detect_s"] <= 1, "a killed process is noticed within a second"
    run = load_run(run_dir)
    assert (run.audit().generations, run.audit().ok, len(run.record.recoveries)) == (3, True, 2)
    unwritten = steps_of(events, rank=1) - steps_of(
        events, rank=0
    )  # rank 0 was killed before it wrote the event
    assert run.record.steps.replayed + len(unwritten) == sum(e["replayed_steps"] for e in recovered)
    assert 0 < run.record.goodput.share < 1
    replayed = [(e["restored_step"], e["steps"]) for e in events if e["event"] == "replayed"]
    repeats = [(e["restored_step"], e["replayed_steps"]) for e in recovered]
    assert replayed == [(step, steps) for step, steps in repeats if steps], "none if no step was lost"
    started = [e["rank"] for e in events if e["event"] == "started"]
    assert len(started) == len(set(started)) + 2, "survivors keep their process"
    require_equal_files(*(folder / "checkpoints/step-00000060" for folder in (run_dir, tmp_path / "calm")))


@pytest.mark.parametrize(
    ("every", "source"),
    [
        ("checkpoint.every_steps=10 checkpoint.asynchronous=false", "checkpoint"),  # committed before step 11
        pytest.param("checkpoint.every_steps=0", "start", marks=pytest.mark.slow),
    ],
)
def test_without_snapshots_the_newest_checkpoint_is_used(command, train, job_file, tmp_path, every, source):
    options = ("layout.dp_replicate=2", "train.steps=30", "elastic.snapshot_every=0", *every.split())
    undisturbed = train(*options, "run_dir=calm")
    run_dir = tmp_path / "run"
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    kill_at(running, run_dir, rank=1, step=14)
    result = result_of(running)
    assert result["losses"] == undisturbed.losses
    (recovered,) = [e for e in running.events(run_dir) if e["event"] == "recovered"]
    assert (recovered["source"], recovered["restored_step"]) == (source, 10 if source == "checkpoint" else 0)


@pytest.mark.slow
def test_the_peak_of_a_device_is_measured_once(command, job_file, tmp_path):
    """Survivors keep the matmul rate that they measured; a replacement gets that of its predecessor."""
    job_file.write_text(job_file.read_text().replace("matmul_flops_per_s = 1e11", ""))
    run_dir = tmp_path / "run"
    options = ("layout.dp_replicate=2", "train.steps=20", f"run_dir={run_dir}", "--json")
    running = command("train", job_file, *options)
    kill_at(running, run_dir, rank=1, step=12)
    result_of(running)
    ready = [e for e in running.events(run_dir) if e["event"] == "ready"]
    peaks = {(e["rank"], e["generation"]): e["peak_flops_per_s"] for e in ready}
    assert [peaks[rank, 1] for rank in (0, 1)] == [peaks[rank, 0] for rank in (0, 1)]
    assert peaks[0, 0] != peaks[1, 0], "each rank measured its own, so that a second measurement would differ"


def test_a_rank_that_dies_again_and_again_ends_the_run(command, job_file, tmp_path):
    """Without a new step the third failure ends a run with ``restarts = 2``."""
    run_dir = tmp_path / "run"
    options = (
        "layout.dp_replicate=2",
        "train.steps=100000",
        "elastic.restarts=2",
        "elastic.snapshot_every=0",
    )
    running = command("train", job_file, *options, f"run_dir={run_dir}")
    kill_at(running, run_dir, rank=1, step=5)
    for generation in (1, 2):
        running.wait_for(
            run_dir,
            lambda e, now=generation: e["event"] == "ready" and (e["rank"], e["generation"]) == (1, now),
        )
        os.kill(last_pid(running, run_dir, 1), signal.SIGKILL)
    status, _, err = running.finish()
    assert status == 4
    assert "[run-rank-died]" in err


@pytest.mark.slow
def test_a_kill_while_ranks_regroup(command, train, job_file, tmp_path):
    """A second rank dies while it joins the next generation. The run goes on."""
    options = ("layout.dp_replicate=3", "train.steps=40", "train.global_batch=12", "elastic.snapshot_every=5")
    undisturbed = train(*options, "run_dir=calm")
    run_dir = tmp_path / "run"
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    kill_at(running, run_dir, rank=1, step=12)
    running.wait_for(run_dir, lambda e: e["event"] == "rank_lost")
    os.kill(last_pid(running, run_dir, 2), signal.SIGKILL)
    assert result_of(running)["losses"] == undisturbed.losses


@pytest.mark.slow
def test_ranks_that_were_killed_at_random_times_cost_no_loss(command, train, job_file, tmp_path):
    """Kills at fixed intervals meet forward, backward, update, evaluation and save as they come."""
    options = (
        "layout.dp_replicate=2",
        "train.steps=400",
        "elastic.snapshot_every=5",
        "checkpoint.every_steps=50",
    )
    undisturbed = train(*options, "run_dir=calm")
    run_dir = tmp_path / "run"
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    kills, generation = 0, 0
    while kills < 6 and running.process.poll() is None:
        running.wait_for(
            run_dir,
            lambda e, now=generation: (
                (e["event"], e["rank"], e["generation"]) == ("step", 0, now) and e["step"] >= 20 * now + 20
            ),
        )
        time.sleep(0.01 * kills)  # another phase of a step each time
        os.kill(last_pid(running, run_dir, kills % 2), signal.SIGKILL)
        kills, generation = kills + 1, generation + 1
    assert result_of(running)["losses"] == undisturbed.losses


@pytest.mark.slow
def test_a_killed_agent_is_replaced(command, train, job_file, tmp_path):
    """Its ranks end and their snapshots are lost: new ones go on from the newest checkpoint."""
    options = ("layout.dp_replicate=2", *STEPS)
    undisturbed = train(*options, "run_dir=calm")
    run_dir = tmp_path / "run"
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 27)
    os.kill(json.loads((run_dir / "agent.json").read_text())["pid"], signal.SIGKILL)
    result = result_of(running)
    assert result["losses"] == undisturbed.losses
    assert result["audit_ok"], result["differences"]
    (recovered,) = [e for e in running.events(run_dir) if e["event"] == "recovered"]
    assert (recovered["source"], recovered["restored_step"]) == ("checkpoint", 20)
    assert recovered["how"] == "the agent of node 0 is gone"
