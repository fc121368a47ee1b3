"""What was promised is what was measured; and when it is not, the audit says so by name."""

from __future__ import annotations

import json

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.record import read_record
from meshwright.cli.audit import audit_folder
from meshwright.cli.output import Output
from meshwright.plan.contract import read_plan


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout.dp_replicate=1"],
        ["layout.dp_replicate=2", "layout.bucket_mb=0.05"],
        ["layout.dp_replicate=4", "layout.micro_batch=1", "model.tied_embeddings=false"],
        ["layout.dp_replicate=2", "compression.kind=bf16", "layout.bucket_mb=0.1"],
        ["layout.dp_replicate=2", "compression.kind=fp16"],
        ["layout.dp_replicate=2", "train.precision=bf16", "model.vocab_size=1024"],
        ["layout.dp_replicate=2", "train.steps=1"],
        ["layout.dp_replicate=1", "train.steps=1", "layout.micro_batch=12"],
    ],
    ids=" ".join,
)
def test_state_and_collectives_equal_the_plan(train, overrides):
    """Every byte of state and every collective, on every rank; the peak within 5%."""
    result = train(*overrides, "train.eval_every=2").result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    rows = result["collectives"]
    assert bool(rows) == (result["world_size"] > 1)
    for row in rows:
        assert (row["calls"], row["bytes"]) == (row["predicted_calls"], row["predicted_bytes"]), row
        assert row["calls"] > 0, f"a planned collective without a call: {row}"


def test_experts_that_are_not_equally_busy_keep_the_plan(train):
    """Fresh routers favour some experts: far more activations than the even share, or fewer, as predicted."""
    experts = ("model.num_experts=4", "model.experts_per_token=2", "layout.ep=2")
    trained = train(*experts, "layout.dp_shard=2", "layout.zero=1", "train.steps=2")
    result = trained.result
    assert result["audit_ok"], result["differences"]
    verdict = audit_run(read_plan(trained.run_dir / "plan.toml"), read_record(trained.run_dir))
    kept = [row for row in verdict.state if row.kind == "activations"]
    assert any(abs(row.expert_load_bytes) > 0.05 * row.predicted for row in kept), (
        "an even load would prove nothing"
    )
    assert all(0 <= row.measured - row.predicted <= 8 for row in kept)
    assert len(verdict.load) == 2


def test_compression_halves_what_is_sent(train):
    def sent(trained):
        return next(
            r["bytes"]
            for r in trained.result["collectives"]
            if (r["axis"], r["phase"], r["op"]) == ("dp_replicate", "step", "all_reduce")
        )

    full = train("layout.dp_replicate=2")
    half = train("layout.dp_replicate=2", "compression.kind=bf16")
    assert 2 * sent(half) == sent(full)


def test_an_extra_collective_fails_the_audit_naming_axis_and_op(train, monkeypatch, capfd):
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:extra_all_reduce")
    trained = train("layout.dp_replicate=2", expect=3)
    assert not trained.result["audit_ok"]
    (difference,) = trained.result["differences"]
    assert "axis dp_replicate, all_reduce in phase step" in difference
    # the command says the same afterwards, from the files alone
    assert audit_folder(Output(as_json=True), trained.run_dir) == 3
    again = json.loads(capfd.readouterr().out)
    assert again["differences"] == [difference]


def test_a_single_stray_broadcast_is_found(train, monkeypatch):
    """One call, in one step, on a group that belongs to no axis."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:extra_broadcast_once")
    trained = train("layout.dp_replicate=2", expect=3)
    (difference,) = trained.result["differences"]
    assert "broadcast in phase step: 1 calls and 40 bytes" in difference
    assert "the plan has no such call" in difference


def test_collectives_that_leave_autograd_out_are_counted_too(train, monkeypatch):
    """A functional collective, as DTensor makes them, and one in inference mode."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:collectives_outside_autograd")
    trained = train("layout.dp_replicate=2", expect=3)
    reduced, broadcast = sorted(trained.result["differences"])
    assert "all_reduce in phase step: 7 calls" in reduced
    assert "broadcast in phase step: 1 calls and 8 bytes" in broadcast


def test_events_hold_every_rank_and_every_step(train):
    """events.jsonl is the truth: a step line from each rank for each step, every line versioned."""
    trained = train("layout.dp_replicate=2", "train.steps=4")
    lines = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    assert {line["v"] for line in lines} == {1}
    steps = sorted((e["rank"], e["step"]) for e in lines if e["event"] == "step")
    assert steps == [(rank, step) for rank in (0, 1) for step in (1, 2, 3, 4)]
    assert all(0 <= e["utilisation"] <= 1 for e in lines if e["event"] == "step")
