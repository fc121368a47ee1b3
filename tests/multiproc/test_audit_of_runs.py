"""The audit of real runs: measured state and collectives equal the plan; unplanned collectives fail it."""

from __future__ import annotations

import json

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import read_record
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
        pytest.param(["layout.dp_replicate=2", "compression.kind=fp16"], marks=pytest.mark.slow),
        ["layout.dp_replicate=2", "train.precision=bf16", "model.vocab_size=1024"],
        pytest.param(["layout.dp_replicate=2", "train.steps=1"], marks=pytest.mark.slow),
        pytest.param(
            ["layout.dp_replicate=1", "train.steps=1", "layout.micro_batch=12"], marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_state_and_collectives_equal_the_plan(train, overrides):
    """On every rank, calls and bytes of each collective and all state bytes; the peak is within 5%."""
    result = train(*overrides, "train.eval_every=2").result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    rows = result["collectives"]
    assert bool(rows) == (result["world_size"] > 1)
    for row in rows:
        assert (row["calls"], row["bytes"]) == (row["predicted_calls"], row["predicted_bytes"]), row
        assert row["calls"] > 0, f"a planned collective without a call: {row}"


def test_uneven_expert_load_is_predicted_from_the_routed_rows(train):
    """Activation bytes differ by more than 5% from those of an even load, and the audit predicts them."""
    experts = ("model.num_experts=4", "model.experts_per_token=2", "layout.ep=2")
    trained = train(*experts, "layout.dp_shard=2", "layout.zero=1", "train.steps=2")
    result = trained.result
    assert result["audit_ok"], result["differences"]
    verdict = audit_run(read_plan(trained.run_dir / "plan.toml"), read_record(trained.run_dir))
    kept = [row for row in verdict.state if row.kind == "activations"]
    assert any(abs(row.expert_load_bytes) > 0.05 * row.predicted for row in kept), "the load is even"
    assert all(0 <= row.measured - row.predicted <= 8 for row in kept)
    assert len(verdict.load) == 2


DROPPING_EXPERTS = (
    "model.num_experts=4",
    "model.experts_per_token=2",
    "model.capacity_factor=1.0",
    "layout.dp_shard=2",
    "layout.ep=2",
    "layout.zero=1",
    "layout.recompute=full",
    "train.steps=2",
)

ROW_BYTES = 64 * 4
"""One row of the tiny model: its hidden size in float32."""


def expert_row(trained, phase):
    """The audit's row of dispatch and combine."""
    rows = trained.result["collectives"]
    return next(r for r in rows if (r["axis"], r["op"], r["phase"]) == ("ep", "all_to_all", phase))


def test_expert_rows_are_measured_at_the_call(train, monkeypatch):
    """Bytes equal the plan's less dropped rows; rows of twice the width change no loss and fail the audit."""
    right = train(*DROPPING_EXPERTS)
    planned = read_plan(right.run_dir / "plan.toml").collectives_of(0)
    for phase, times in (("step", 2), ("eval", 1)):
        row, (plan,) = expert_row(right, phase), (r for r in planned if (r.axis, r.phase) == ("ep", phase))
        assert row["dropped_rows"] > 0, "the router dropped nothing"
        assert row["bytes"] == row["predicted_bytes"] == times * plan.bytes - row["dropped_rows"] * ROW_BYTES
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:wide_expert_rows")
    wide = train(*DROPPING_EXPERTS, expect=3)
    assert wide.losses == right.losses
    assert {(row["axis"], row["op"]) for row in differing_rows(wide).values()} == {("ep", "all_to_all")}
    assert expert_row(wide, "step")["bytes"] > 1.9 * expert_row(right, "step")["bytes"]


def test_bf16_compression_halves_the_all_reduce_bytes(train):
    def all_reduce_bytes(trained):
        return next(
            r["bytes"]
            for r in trained.result["collectives"]
            if (r["axis"], r["phase"], r["op"]) == ("dp_replicate", "step", "all_reduce")
        )

    full = train("layout.dp_replicate=2")
    half = train("layout.dp_replicate=2", "compression.kind=bf16")
    assert 2 * all_reduce_bytes(half) == all_reduce_bytes(full)


def differing_rows(trained):
    """Rows of the audit whose calls or bytes differ from the plan; each has one line in `differences`."""
    rows = trained.result["collectives"]
    found = [
        row
        for row in rows
        if (row["calls"], row["bytes"]) != (row["predicted_calls"], row["predicted_bytes"])
    ]
    assert len(trained.result["differences"]) == len(found)
    assert not trained.result["audit_ok"]
    return {row["op"]: row for row in found}


def test_an_extra_all_reduce_fails_the_audit_with_its_axis_and_phase(train, monkeypatch, capfd):
    """`meshwright audit` reports the same difference from the run folder."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:extra_all_reduce")
    trained = train("layout.dp_replicate=2", expect=3)
    (row,) = differing_rows(trained).values()
    assert (row["axis"], row["op"], row["phase"]) == ("dp_replicate", "all_reduce", "step")
    assert trained.result["status"] == "complete"
    assert f"training finished; the audit differs: {trained.result['differences'][0]}" in trained.messages
    assert audit_folder(Output(as_json=True), trained.run_dir) == 3
    again = json.loads(capfd.readouterr().out)
    assert again["differences"] == trained.result["differences"]


def test_one_extra_broadcast_fails_the_audit(train, monkeypatch):
    """One call, in one step, on a process group of no axis."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:extra_broadcast_once")
    trained = train("layout.dp_replicate=2", expect=3)
    (row,) = differing_rows(trained).values()
    assert (row["op"], row["phase"]) == ("broadcast", "step")
    assert (row["calls"], row["bytes"], row["predicted_calls"]) == (1, 40, 0)


def test_collectives_outside_autograd_are_counted(train, monkeypatch):
    """A functional collective, as DTensor uses, and one in inference mode."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:collectives_outside_autograd")
    rows = differing_rows(train("layout.dp_replicate=2", expect=3))
    assert rows.keys() == {"all_reduce", "broadcast"}
    assert {row["phase"] for row in rows.values()} == {"step"}
    assert rows["all_reduce"]["calls"] == 7
    assert (rows["broadcast"]["calls"], rows["broadcast"]["bytes"]) == (1, 8)


def test_events_have_a_line_for_every_step_of_every_rank(train):
    """Each line of events.jsonl has the format version."""
    trained = train("layout.dp_replicate=2", "train.steps=4")
    lines = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    assert {line["v"] for line in lines} == {1}
    steps = sorted((e["rank"], e["step"]) for e in lines if e["event"] == "step")
    assert steps == [(rank, step) for rank in (0, 1) for step in (1, 2, 3, 4)]
    assert all(0 <= e["utilisation"] <= 1 for e in lines if e["event"] == "step")
