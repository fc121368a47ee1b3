"""Every rank writes its own state without communication; a killed save keeps the previous checkpoint."""

from __future__ import annotations

import json

import pytest

from meshwright.checkpoint.drafts import list_leftovers
from meshwright.checkpoint.manifest import (
    checkpoint_name,
    list_checkpoints,
    read_manifest,
)
from meshwright.checkpoint.stores import find_newest
from meshwright.runs.train import ENTRY


@pytest.mark.parametrize("layout", [("layout.dp_shard=4",), ("layout.dp_replicate=2", "layout.tp=2")])
def test_every_rank_writes_its_share_and_gathers_nothing(train, monkeypatch, layout):
    """Nothing but the copy in staging memory is made, and the files of all ranks have about the same size."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_saving_memory")
    trained = train(*layout, "train.steps=1", "model.num_layers=6")
    assert trained.result["audit_ok"], trained.result["differences"]
    newest, refused = find_newest(trained.run_dir / "checkpoints")
    assert not refused
    files = read_manifest(newest).files
    sizes = [files[f"rank-{rank:05d}.safetensors"].bytes for rank in range(4)]
    assert max(sizes) < 1.2 * min(sizes)
    for rank in range(4):
        memory = json.loads((trained.run_dir / f"saving-{rank}.json").read_text())
        assert memory["peak"] - memory["before"] <= sizes[rank], "more than its own part"
    assert not [row for row in trained.result["collectives"] if row["phase"] not in ("setup", "step", "eval")]


def test_sigkill_during_a_save_keeps_the_previous_checkpoint(train, monkeypatch):
    """Half of the tensors are written. The run resumes from the previous checkpoint and removes the draft."""
    common = ("layout.dp_shard=2", "checkpoint.every_steps=2", "run_dir=run", "train.steps=6")
    straight = train(*common, "run_dir=straight")
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:sigkill_during_save")
    failed = train(*common, "elastic.restarts=0", expect=4)
    (error,) = failed.result["errors"]
    assert error["code"] == "run-rank-died"
    assert "rank 0 of 2" in error["message"]
    root = failed.run_dir / "checkpoints"
    assert [path.name for path in list_checkpoints(root)] == ["step-00000002"]
    (draft,) = list_leftovers(root)
    assert (draft / "rank-00000.safetensors").stat().st_size > 0, "nothing was written before the kill"
    monkeypatch.setattr("meshwright.runs.train.ENTRY", ENTRY)
    again = train(*common, resume=True)
    assert again.losses == straight.losses
    assert not list_leftovers(root)


def test_auto_saves_at_an_interval_that_all_ranks_follow(train):
    """Failures are so frequent that the time until the commit is the interval. Every save has all votes."""
    settings = ("checkpoint.auto=true", "cluster.failure_hours=1e-6", "checkpoint.keep_last=99")
    trained = train("layout.dp_replicate=2", "train.steps=40", *settings)
    events = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    saved = [event for event in events if event["event"] == "checkpoint"]
    chosen = [event for event in events if event["event"] == "checkpoint_interval"]
    assert chosen[0]["interval_s"] == chosen[0]["commit_s"] > chosen[0]["between_failures_s"]
    assert saved[0]["step"] == 13, "10 steps after the first and the audited one, and the step that says so"
    assert len(saved) >= 2, "and the last one; between them as many as the disk allows"
    names = [path.name for path in list_checkpoints(trained.run_dir / "checkpoints")]
    assert names == [checkpoint_name(event["step"]) for event in saved]
    assert all(event["blocked_s"] >= event["waited_s"] >= 0 for event in saved)
    assert any(event["slowdown"] is not None for event in saved[:-1])
    assert saved[-1]["blocked_s"] >= saved[-1]["seconds"], "training waits for the last one"
    found = trained.result["checkpoints"]
    assert (found["count"], found["interval_s"]) == (len(saved), chosen[-1]["interval_s"])
    assert chosen[-1]["reason"] == found["interval_reason"]
    assert chosen[0]["reason"] in trained.messages
