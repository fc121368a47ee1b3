"""The audit passes what was promised and nothing else, and names what differs."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.audit.compare import PEAK_TOLERANCE, StateRow, audit_run
from meshwright.plan.build import build_plan
from meshwright.spec.load import build_job

EXTRA = {"axis": "dp_replicate", "op": "all_gather", "phase": "step", "ranks": 2, "calls": 1, "bytes": 8}


def test_a_run_that_kept_its_plan_passes(plan, kept, record_of):
    audit = audit_run(plan, record_of(kept()))
    assert audit.ok
    assert audit.differences == ()
    assert len(audit.state) == 2 * 5, "parameters, gradients, optimizer, activations and peak of two ranks"
    assert all(row.ok for row in audit.state)
    assert len(audit.collectives) == 4
    assert all(row.equal for row in audit.collectives)


def test_collectives_are_predicted_for_the_steps_and_evaluations_that_were_run(plan, kept, record_of):
    rows = {(r.axis, r.op, r.phase): r for r in audit_run(plan, record_of(kept())).collectives}
    assert rows["dp_replicate", "all_reduce", "step"].predicted_calls == 4 * 3
    assert rows["dp_replicate", "all_reduce", "step"].predicted_bytes == 4 * 378_112
    assert rows["control", "all_reduce", "eval"].predicted_calls == 2
    assert rows["dp_replicate", "broadcast", "setup"].predicted_calls == 2


def test_rows_come_in_the_order_of_the_run(plan, kept, record_of):
    phases = [row.phase for row in audit_run(plan, record_of(kept())).collectives]
    assert phases == ["setup", "step", "step", "eval"]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_an_extra_collective_is_named_with_its_axis_and_op(plan, kept, record_of, find, ranks):
    """On one rank only is enough, whichever it is."""
    events = kept()
    for rank in ranks:
        find(events, "collectives", rank)["rows"].append(dict(EXTRA))
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert "axis dp_replicate, all_gather in phase step: 1 calls and 8 bytes, predicted 0 and 0" in difference
    assert "the plan has no such call" in difference
    assert not audit.ok


def test_a_collective_on_an_axis_that_the_plan_does_not_know_fails(plan, kept, record_of, find):
    events = kept()
    find(events, "collectives", 1)["rows"].append({**EXTRA, "axis": "group 7"})
    (difference,) = audit_run(plan, record_of(events)).differences
    assert "axis group 7, all_gather" in difference


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("row", range(4))
def test_a_missing_collective_is_named(plan, kept, record_of, find, rank, row):
    events = kept()
    gone = find(events, "collectives", rank)["rows"].pop(row)
    (difference,) = audit_run(plan, record_of(events)).differences
    assert f"axis {gone['axis']}, {gone['op']} in phase {gone['phase']}: 0 calls and 0 bytes" in difference


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("key", "more"), [("bytes", 1), ("bytes", -1), ("calls", 1), ("calls", -1)])
def test_one_byte_or_one_call_more_or_less_on_one_rank_fails(plan, kept, record_of, find, rank, key, more):
    events = kept()
    find(events, "collectives", rank)["rows"][1][key] += more
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert difference.startswith("axis dp_replicate, all_reduce in phase step")
    (row,) = [r for r in audit.collectives if not r.equal]
    assert getattr(row, key) - getattr(row, f"predicted_{key}") == more, "the rank that differs is shown"


def test_calls_in_another_phase_are_not_taken_for_the_promised_ones(plan, kept, record_of, find):
    events = kept()
    find(events, "collectives", 0)["rows"][0]["phase"] = "step"
    differences = audit_run(plan, record_of(events)).differences
    assert {("broadcast in phase setup" in d, "broadcast in phase step" in d) for d in differences} == {
        (True, False),
        (False, True),
    }


def test_a_second_row_of_the_same_kind_is_added_up_and_not_forgotten(plan, kept, record_of, find):
    """The counter keeps groups of different size apart; the audit must not let one hide the other."""
    events = kept()
    rows = find(events, "collectives", 0)["rows"]
    rows.insert(0, {**rows[1], "ranks": 4, "calls": 1, "bytes": 8})
    assert not audit_run(plan, record_of(events)).ok


def test_a_group_of_another_size_than_promised_fails(plan, kept, record_of, find):
    events = kept()
    find(events, "collectives", 0)["rows"][1]["ranks"] = 3
    assert not audit_run(plan, record_of(events)).ok


# State and peak


@pytest.fixture(scope="module")
def own_plan():
    """One GPU with Triton blocks."""
    sizes = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4}
    job = build_job(
        {
            "model": sizes | {"ffn_size": 512, "vocab_size": 512},
            "cluster": {"preset": "h200-sxm", "devices_per_node": 1},
            "data": {"path": "text", "seq_len": 256},
            "train": {"steps": 4, "global_batch": 4, "precision": "bf16", "block_backend": "triton"},
            "layout": {"dp_replicate": 1, "micro_batch": 4},
        }
    )
    return build_plan(job)[0]


@pytest.mark.parametrize(("kind", "allowed"), [("activation_bytes", 0.05), ("peak_bytes", 0.03)])
def test_what_our_own_kernels_hold_is_judged_although_compiled(
    own_plan, events_of, record_of, find, kind, allowed
):
    """And not what torch's compiler decides."""
    theirs = dataclasses.replace(
        own_plan.job, train=dataclasses.replace(own_plan.job.train, block_backend="compile")
    )
    for factor, held in ((1 + 0.99 * allowed, True), (1 - 0.99 * allowed, True), (1 + 1.01 * allowed, False)):
        events = events_of(own_plan)
        state = find(events, "state", 0)
        state |= {"compiled": True, kind: round(state[kind] * factor)}
        assert audit_run(own_plan, record_of(events)).ok is held
        assert audit_run(dataclasses.replace(own_plan, job=theirs), record_of(events)).ok


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("more", [1, -1])
def test_state_must_be_equal_to_the_byte_on_every_rank(plan, kept, record_of, find, kind, more):
    events = kept()
    find(events, "state", 1)["state_bytes"][kind] += more
    (difference,) = audit_run(plan, record_of(events)).differences
    assert difference.startswith(f"rank 1: {kind} is ")
    assert "must be equal" in difference


@pytest.mark.parametrize(("share", "held"), [(0.049, True), (-0.049, True), (0.051, False), (-0.051, False)])
def test_the_peak_may_differ_by_five_percent_and_no_more(plan, kept, record_of, find, share, held):
    assert PEAK_TOLERANCE == 0.05
    events = kept()
    state = find(events, "state", 0)
    state["peak_bytes"] = round(state["peak_bytes"] * (1 + share))
    audit = audit_run(plan, record_of(events))
    assert audit.ok is held
    if not held:
        assert audit.differences[0].startswith("rank 0: peak is ")
        assert "5% allowed" in audit.differences[0]


def test_the_first_steps_peak_is_judged_by_the_first_steps_promise(plan, kept, record_of, find):
    """With accumulation under DDP the first step holds gradients twice: 16% more here."""
    promised = plan.ranks[0]
    assert promised.first_peak_bytes > promised.peak_bytes * 1.05
    events = kept()
    state = find(events, "state", 0)
    state["peak_bytes"] = promised.first_peak_bytes
    assert not audit_run(plan, record_of(events)).ok
    state["first_step"] = True
    assert audit_run(plan, record_of(events)).ok
    state["peak_bytes"] = promised.peak_bytes
    assert not audit_run(plan, record_of(events)).ok


def test_what_was_not_measured_did_not_hold(plan, kept, record_of):
    events = [e for e in kept() if not (e["event"] == "state" and e["rank"] == 1)]
    audit = audit_run(plan, record_of(events))
    assert [d.split(" was not measured")[0] for d in audit.differences] == [
        f"rank 1: {kind}" for kind in ("parameters", "gradients", "optimizer", "activations", "peak")
    ]


def test_a_kind_of_state_that_was_not_measured_did_not_hold(plan, kept, record_of, find):
    events = kept()
    del find(events, "state", 0)["state_bytes"]["optimizer"]
    (difference,) = audit_run(plan, record_of(events)).differences
    assert difference.startswith("rank 0: optimizer was not measured")


def test_ranks_whose_collectives_were_not_reported_are_named(plan, kept, record_of):
    events = [e for e in kept() if not (e["event"] == "collectives" and e["rank"] == 1)]
    (difference,) = audit_run(plan, record_of(events)).differences
    assert "rank 1 did not report its collectives" in difference


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        (
            ("finished", "state", "collectives"),
            "did not finish: not measured on every rank: memory and c",
        ),
        (("finished", "collectives"), "did not finish: not measured on every rank: collectives"),
        (("finished",), "the run did not finish"),
    ],
)
def test_a_run_that_did_not_end_fails_in_one_sentence(plan, kept, record_of, gone, says):
    audit = audit_run(plan, record_of([e for e in kept() if e["event"] not in gone]))
    (difference,) = audit.differences
    assert says in difference
    assert not audit.ok
    assert audit.measured is ("state" not in gone)


def test_a_run_that_did_not_end_still_names_what_differs(plan, kept, record_of, find):
    events = [e for e in kept() if e["event"] not in ("finished", "collectives")]
    find(events, "state", 1)["state_bytes"]["optimizer"] += 1
    first, second = audit_run(plan, record_of(events)).differences
    assert first.startswith("rank 1: optimizer is ")
    assert "did not finish" in second


@pytest.mark.parametrize(
    ("also", "says"), [((), "memory was not measured"), (("collectives",), "nothing was")]
)
def test_a_run_interrupted_before_the_audited_step_fails_in_one_sentence(plan, kept, record_of, also, says):
    events = [e for e in kept() if e["event"] not in ("state", *also)]
    events = [{**e, "status": "interrupted"} if e["event"] == "finished" else e for e in events]
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert difference.startswith(f"stopped before the audited step: {says}")
    assert (audit.ok, audit.measured) == (False, False)


def test_an_empty_record_fails(plan, record_of):
    assert len(audit_run(plan, record_of([])).differences) == 1


def test_a_state_row_with_nothing_predicted_holds_only_for_nothing():
    assert StateRow(0, "gradients", 0, 0).ok
    assert not StateRow(0, "gradients", 0, 1).ok
    assert not StateRow(0, "gradients", 0, None).ok


def test_the_audit_as_json_carries_the_verdict_of_every_row(plan, kept, record_of, find):
    events = kept()
    find(events, "state", 1)["state_bytes"]["optimizer"] += 1
    shown = audit_run(plan, record_of(events)).as_dict()
    assert shown["audit_ok"] is False
    assert len(shown["differences"]) == 1
    assert [row["ok"] for row in shown["state"]] == [True] * 7 + [False, True, True]
    assert set(shown["collectives"][0]) == {
        "axis",
        "op",
        "phase",
        "ranks",
        "calls",
        "bytes",
        "predicted_calls",
        "predicted_bytes",
    }


# Ranks of a pipeline


def test_each_rank_of_a_pipeline_is_held_to_its_own_promise(pipeline_plan, events_of, record_of):
    audit = audit_run(pipeline_plan, record_of(events_of(pipeline_plan)))
    assert audit.ok, audit.differences
    sends = [row for row in audit.collectives if (row.axis, row.phase) == ("pp", "eval")]
    assert [row.pp_rank for row in sends] == [0], "the last place sends nothing in an evaluation"
    assert "pp_rank" not in audit.as_dict()["collectives"][0], "control: the same promise for all"


def test_a_send_too_many_is_named_with_its_place(pipeline_plan, events_of, record_of, find):
    events = events_of(pipeline_plan)
    row = next(r for r in find(events, "collectives", 1)["rows"] if (r["axis"], r["phase"]) == ("pp", "step"))
    row["calls"] += 1
    [difference] = audit_run(pipeline_plan, record_of(events)).differences
    assert "axis pp, send in phase step" in difference


def test_a_rank_that_does_its_neighbours_work_is_found(pipeline_plan, events_of, record_of, find):
    """What place 0 is promised is no excuse for place 1."""
    events = events_of(pipeline_plan)
    find(events, "collectives", 1)["rows"] = find(events, "collectives", 0)["rows"]
    differences = audit_run(pipeline_plan, record_of(events)).differences
    assert any(text.startswith("pp rank 1, axis pp, send in phase eval") for text in differences)
