"""CPU memory of in-memory snapshots: a run reserves exactly what its plan predicts."""

from __future__ import annotations

import json
import re

import pytest

from meshwright.layout import snapshot_size
from meshwright.plan.contract import read_plan

EXPERTS = ("model.num_experts=4", "model.experts_per_token=2", "train.balance_rate=0.01")
LAYOUTS = [
    pytest.param("layout.dp_replicate=1", "train.optimizer=muon", id="one process, muon"),
    pytest.param("layout.dp_shard=2", "model.vocab_size=257", id="zero-3, uneven shards"),
    *(
        pytest.param(*overrides, id=name, marks=pytest.mark.slow)
        for name, overrides in {
            "ddp": ("layout.dp_replicate=2", "layout.bucket_mb=0.05"),
            "zero-1": ("layout.dp_shard=2", "layout.zero=1", "train.optimizer=lion"),
            "zero-2": ("layout.dp_shard=3", "layout.zero=2", "train.optimizer=sgd"),
            "pp2 tp2": ("layout.pp=2", "layout.tp=2"),
            "tied pipeline": ("layout.pp=2", "model.tied_embeddings=true", "model.vocab_size=257"),
            "cp": ("layout.cp=2", "layout.zero=1"),
            "experts": (*EXPERTS, "layout.dp_shard=2", "layout.ep=2"),
            "experts, fixed biases": (*EXPERTS[:2], "layout.dp_shard=2", "layout.ep=2"),
            "experts, zero-1": (*EXPERTS, "layout.dp_shard=2", "layout.ep=2", "layout.zero=1"),
            "offload": ("layout.dp_replicate=2", "layout.offload=optimizer"),
        }.items()
    ),
]


@pytest.fixture
def snapshot_rows():
    """The rows of snapshots in an audit, as rank, predicted and measured bytes."""

    def find(result):
        rows = [row for row in result["state"] if row["kind"] == "snapshots in CPU memory"]
        return [(row["rank"], row["predicted"], row["measured"]) for row in rows]

    return find


def audit_of(run_dir, capfd):
    from meshwright.cli.audit import audit_folder
    from meshwright.cli.output import Output

    capfd.readouterr()
    status = audit_folder(Output(as_json=True), str(run_dir))
    return status, json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("overrides", [pytest.param(p.values, id=p.id, marks=p.marks) for p in LAYOUTS])
def test_reserved_bytes_equal_the_plan(train, capfd, snapshot_rows, overrides):
    """On every rank, to the byte; every rank has a row."""
    trained = train(*overrides, "train.steps=2", "train.global_batch=12")
    assert trained.result["audit_ok"], trained.result["differences"]
    status, result = audit_of(trained.run_dir, capfd)
    assert status == 0
    rows = snapshot_rows(result)
    plan = read_plan(trained.run_dir / "plan.toml")
    assert [rank for rank, _, _ in rows] == list(range(plan.world_size))
    assert all(predicted == measured > 0 for _, predicted, measured in rows), rows
    assert plan.host_memory.snapshot_bytes == sum(predicted for _, predicted, _ in rows)


def test_another_size_fails_the_audit(train, monkeypatch, capfd):
    """The planner forgets the optimizer state."""
    sizes = snapshot_size._list_state_bytes

    def without_moments(job, parameter, rank):
        return sizes(job, parameter, rank)[:1]

    monkeypatch.setattr(snapshot_size, "_list_state_bytes", without_moments)
    trained = train("layout.dp_replicate=1", "train.steps=2", expect=3)
    (difference,) = trained.result["differences"]
    assert "snapshots in CPU memory is" in difference
    assert "must be equal" in difference


def test_snapshots_that_do_not_fit_are_off(train, capfd, snapshot_rows):
    """The plan says so with its numbers, the run warns, and goes on without."""
    options = ("layout.dp_replicate=1", "train.steps=3", "elastic.snapshot_every=1")
    trained = train(*options, "cluster.host_memory_bytes=1000000", "cluster.devices_per_node=2")
    plan = read_plan(trained.run_dir / "plan.toml")
    assert plan.host_memory.snapshots_off
    assert any(text.startswith("in-memory snapshots off: ") for text in plan.reasons)
    assert "elastic.snapshot_every=1 has no effect" in trained.messages
    assert [rank.snapshot_bytes for rank in plan.ranks] == [0]
    assert snapshot_rows(audit_of(trained.run_dir, capfd)[1]) == []
    events = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    (off,) = [event for event in events if event["event"] == "snapshots_off"]
    assert off["planned"] is True
    assert off["reason"] == plan.host_memory.snapshots_off
    assert re.fullmatch(
        r"those of 1 rank need .*B of CPU memory per node, which has 2 MB; training.*", off["reason"]
    )
