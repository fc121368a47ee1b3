"""Backup replicas: a step uses the first gradients, and the result does not depend on who was first."""

from __future__ import annotations

import json
import statistics

import pytest

from meshwright import load_job

JOB = (
    "model.num_layers=4",
    "train.steps=12",
    "train.global_batch=12",
    "layout.micro_batch=2",
    "train.eval_every=6",
)


def read_events(trained):
    return [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]


def step_events(trained):
    return [event for event in read_events(trained) if event["event"] == "step"]


def used_slices(trained):
    """Slice by rank, for each step."""
    found = {}
    for event in step_events(trained):
        found.setdefault(event["step"], {})[event["rank"]] = event["slice"]
    return found


def test_losses_equal_the_replicas_without_backup_bit_by_bit(train):
    """The exit status says that state, memory and all collectives equal the plan."""
    plain = train(*JOB, "layout.dp_replicate=2", "run_dir=plain")
    backed = train(*JOB, "layout.dp_replicate=3", "layout.backup_replicas=1", "run_dir=backed")
    assert backed.losses == plain.losses
    for slices in used_slices(backed).values():
        assert sorted(s for s in slices.values() if s is not None) == [0, 1], "every slice counts once"


@pytest.mark.slow
def test_a_slow_replica_delays_nobody(train, monkeypatch):
    """Rank 0 sleeps in every block. A backup computes its slice; the sums are those of equally fast ranks."""
    options = (*JOB, "train.steps=30", "layout.dp_replicate=5", "layout.backup_replicas=2")
    calm = train(*options, "run_dir=calm")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:slow_blocks")
    slow = train(*options, "run_dir=slow")
    alone = train(*JOB, "train.steps=30", "layout.dp_replicate=3", "run_dir=alone")
    assert slow.losses == calm.losses
    assert slow.losses == pytest.approx(alone.losses, rel=1e-5), "gloo sums in another order"
    taken = [slices[0] is None for step, slices in used_slices(slow).items() if step > 5]
    assert sum(taken) > 0.8 * len(taken), "another replica computed the slice of rank 0"

    def median_step(trained):
        return statistics.median(
            e["step_s"] for e in step_events(trained) if e["rank"] == 1 and e["step"] > 5
        )

    assert median_step(slow) < 0.6 * median_step(alone)


@pytest.mark.slow
def test_a_killed_backup_and_a_killed_owner_are_replaced(train, monkeypatch):
    """The claims of a generation do not reach the next one: losses are those of a run without a fault."""
    options = (*JOB, "layout.dp_replicate=3", "layout.backup_replicas=1", "elastic.snapshot_every=2")
    calm = train(*options, "run_dir=calm")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:killed_while_computing")
    disturbed = train(*options, "run_dir=disturbed")
    assert disturbed.losses == calm.losses
    recovered = [e for e in read_events(disturbed) if e["event"] == "recovered"]
    assert [e["failed_rank"] for e in recovered] == [2, 0]


@pytest.mark.slow
def test_layout_equals_one_process(job_file, monkeypatch):
    """`prove`: losses and all gradients equal those of one process."""
    job = load_job(str(job_file), "layout.dp_replicate=3", "layout.backup_replicas=1", "train.global_batch=8")
    assert job.prove().equal
