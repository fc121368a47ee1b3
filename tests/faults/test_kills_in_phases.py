"""A rank is killed in each phase of training, in layouts with all kinds of state. Nothing is lost."""

from __future__ import annotations

import json
import os
import signal

import pytest
from test_stopped_ranks import StoppedRun, require_no_double_commit

PHASES = ("forward", "backward", "update", "evaluation", "checkpoint")
PIPELINE_PHASES = ("forward and backward", "update", "evaluation", "checkpoint")
EXPERTS = ("layout.dp_shard=2", "layout.ep=2", "model.num_experts=4", "model.experts_per_token=2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "phases"),
    [
        pytest.param(("layout.dp_replicate=4",), PHASES, id="ddp4"),
        pytest.param(("layout.dp_shard=4",), PHASES, id="zero3x4"),
        pytest.param(("layout.pp=2", "layout.tp=2"), PIPELINE_PHASES, id="pp2 tp2"),
        pytest.param(EXPERTS, PHASES, id="moe"),
    ],
)
def test_a_kill_in_any_phase_costs_no_loss(command, train, job_file, tmp_path, layout, phases):
    """One kill per phase in one run, of another rank each time; rank 0 in a save, which it writes."""
    steps, run_dir = 200, tmp_path / "run"
    options = (*layout, f"train.steps={steps}", "train.eval_every=5", "checkpoint.every_steps=5")
    options += ("elastic.snapshot_every=5",)
    running = command("train", job_file, *options, f"run_dir={run_dir}", "--json")
    run = StoppedRun(running, run_dir)
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 7)
    ranks = len(run.events("started"))
    for number, phase in enumerate(phases, start=1):
        os.kill(run.stop_in(phase, 0 if phase == "checkpoint" else number % ranks), signal.SIGKILL)
        running.wait_for(run_dir, lambda _, count=number: len(run.events("recovered")) == count)
        run.wait_for_steps()
    status, out, err = running.finish(300)
    assert status == 0, err
    result = json.loads(out)
    undisturbed = train(*options, "run_dir=calm")
    assert result["losses"] == undisturbed.losses
    assert result["audit_ok"], result["differences"]
    require_no_double_commit(running.events(run_dir))
