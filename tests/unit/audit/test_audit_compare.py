"""The audit passes only a run that equals its plan within tolerance, and it names every difference."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.audit.compare import (
    CUDA_BLOCK_SLACK,
    SMALL_PEAK_BYTES,
    SMALL_PEAK_TOLERANCE,
    StateRow,
    audit_run,
)
from meshwright.plan.build import build_plan
from meshwright.spec.load import build_job

EXTRA = {"axis": "dp_replicate", "op": "all_gather", "phase": "step", "ranks": 2, "calls": 1, "bytes": 8}


def test_a_run_that_matches_its_plan_passes(plan, matching_events, record_of):
    audit = audit_run(plan, record_of(matching_events()))
    assert audit.ok
    assert audit.differences == ()
    assert len(audit.state) == 2 * 5, "parameters, gradients, optimizer, activations and peak of two ranks"
    assert all(row.ok for row in audit.state)
    assert len(audit.collectives) == 4
    assert all(row.equal for row in audit.collectives)


def test_predicted_calls_scale_with_the_executed_steps_and_evaluations(plan, matching_events, record_of):
    rows = {(r.axis, r.op, r.phase): r for r in audit_run(plan, record_of(matching_events())).collectives}
    assert rows["dp_replicate", "all_reduce", "step"].predicted_calls == 4 * 3
    assert rows["dp_replicate", "all_reduce", "step"].predicted_bytes == 4 * 378_112
    assert rows["control", "all_reduce", "eval"].predicted_calls == 2
    assert rows["dp_replicate", "broadcast", "setup"].predicted_calls == 2


def test_collective_rows_are_ordered_by_phase(plan, matching_events, record_of):
    phases = [row.phase for row in audit_run(plan, record_of(matching_events())).collectives]
    assert phases == ["setup", "step", "step", "eval"]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_an_extra_collective_is_named_with_its_axis_and_op(
    plan, matching_events, record_of, find_event, ranks
):
    """One extra call on one rank is enough, whichever rank it is."""
    events = matching_events()
    for rank in ranks:
        find_event(events, "collectives", rank)["rows"].append(dict(EXTRA))
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert "axis dp_replicate, all_gather in phase step: 1 calls and 8 bytes, predicted 0 and 0" in difference
    assert "the plan has no such call" in difference
    assert not audit.ok


def test_a_collective_on_an_unplanned_axis_fails(plan, matching_events, record_of, find_event):
    events = matching_events()
    find_event(events, "collectives", 1)["rows"].append({**EXTRA, "axis": "group 7"})
    (difference,) = audit_run(plan, record_of(events)).differences
    assert "axis group 7, all_gather" in difference


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("row", range(4))
def test_a_missing_collective_is_named(plan, matching_events, record_of, find_event, rank, row):
    events = matching_events()
    gone = find_event(events, "collectives", rank)["rows"].pop(row)
    (difference,) = audit_run(plan, record_of(events)).differences
    assert f"axis {gone['axis']}, {gone['op']} in phase {gone['phase']}: 0 calls and 0 bytes" in difference


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("key", "more"), [("bytes", 1), ("bytes", -1), ("calls", 1), ("calls", -1)])
def test_a_difference_of_one_byte_or_call_on_one_rank_fails(
    plan, matching_events, record_of, find_event, rank, key, more
):
    events = matching_events()
    find_event(events, "collectives", rank)["rows"][1][key] += more
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert difference.startswith("axis dp_replicate, all_reduce in phase step")
    (row,) = [r for r in audit.collectives if not r.equal]
    assert getattr(row, key) - getattr(row, f"predicted_{key}") == more, "the rank that differs is shown"


def test_calls_in_another_phase_do_not_count_as_planned(plan, matching_events, record_of, find_event):
    events = matching_events()
    find_event(events, "collectives", 0)["rows"][0]["phase"] = "step"
    differences = audit_run(plan, record_of(events)).differences
    assert {("broadcast in phase setup" in d, "broadcast in phase step" in d) for d in differences} == {
        (True, False),
        (False, True),
    }


def test_rows_of_the_same_axis_and_op_are_summed(plan, matching_events, record_of, find_event):
    """The counter lists groups of different sizes separately. The audit must not drop one of them."""
    events = matching_events()
    rows = find_event(events, "collectives", 0)["rows"]
    rows.insert(0, {**rows[1], "ranks": 4, "calls": 1, "bytes": 8})
    assert not audit_run(plan, record_of(events)).ok


def test_a_group_of_another_size_than_planned_fails(plan, matching_events, record_of, find_event):
    events = matching_events()
    find_event(events, "collectives", 0)["rows"][1]["ranks"] = 3
    assert not audit_run(plan, record_of(events)).ok


# State and peak


@pytest.fixture(scope="module")
def triton_plan():
    """A plan for one GPU with Triton blocks."""
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
def test_memory_of_triton_blocks_is_audited_and_of_torch_compile_bounded(
    triton_plan, events_of, record_of, find_event, kind, allowed
):
    """Triton blocks have an exact ledger. Of what torch.compile saves the ledger is an upper bound."""
    compiled_job = dataclasses.replace(
        triton_plan.job, train=dataclasses.replace(triton_plan.job.train, block_backend="compile")
    )
    predicted = find_event(events_of(triton_plan), "state", 0)[kind]
    slack = CUDA_BLOCK_SLACK if kind == "activation_bytes" else 0
    most = max(allowed * predicted, slack)
    for more, passes in ((0.99 * most, True), (-0.99 * most, True), (1.01 * most, False)):
        events = events_of(triton_plan)
        state = find_event(events, "state", 0)
        state |= {"compiled": True, kind: round(predicted + more)}
        assert audit_run(triton_plan, record_of(events)).ok is passes
    most = max(0.05 * predicted, slack)
    for more, passes in ((0.99 * most, True), (-0.5 * predicted, True), (1.01 * most, False)):
        state[kind] = round(predicted + more)
        audit = audit_run(dataclasses.replace(triton_plan, job=compiled_job), record_of(events))
        assert audit.ok is passes


@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer"])
@pytest.mark.parametrize("more", [1, -1])
def test_state_must_be_equal_to_the_byte_on_every_rank(
    plan, matching_events, record_of, find_event, kind, more
):
    events = matching_events()
    find_event(events, "state", 1)["state_bytes"][kind] += more
    (difference,) = audit_run(plan, record_of(events)).differences
    assert difference.startswith(f"rank 1: {kind} is ")
    assert "must be equal" in difference


@pytest.mark.parametrize(("more_bytes", "allowed"), [(0, 0.12), (SMALL_PEAK_BYTES, 0.05)])
@pytest.mark.parametrize(("share", "passes"), [(0.99, True), (-0.99, True), (1.01, False), (-1.01, False)])
def test_the_peak_may_differ_by_five_percent_and_a_small_one_by_twelve(
    plan, events_of, record_of, find_event, more_bytes, allowed, share, passes
):
    ranks = [dataclasses.replace(rank, peak_bytes=rank.peak_bytes + more_bytes) for rank in plan.ranks]
    plan = dataclasses.replace(plan, ranks=tuple(ranks))
    events = events_of(plan)
    state = find_event(events, "state", 0)
    state["peak_bytes"] = round(state["peak_bytes"] * (1 + share * allowed))
    audit = audit_run(plan, record_of(events))
    assert audit.ok is passes
    if not passes:
        assert audit.differences[0].startswith("rank 0: peak is ")
        assert f"must be within {allowed:.0%}" in audit.differences[0]
        assert ("a peak below 8 MiB" in audit.differences[0]) is (allowed == 0.12)


@pytest.mark.parametrize(
    ("share", "match"), [(0.04, "within 5%"), (-0.04, "within 5%"), (0.06, "within 12% (a peak below 8 MiB)")]
)
def test_a_small_peak_names_the_rule_that_it_needs(share, match):
    row = StateRow(0, "peak", 10**6, round(10**6 * (1 + share)), SMALL_PEAK_TOLERANCE)
    assert (row.ok, row.match) == (True, match)


def test_a_peak_of_the_first_step_is_compared_with_the_first_steps_prediction(
    plan, matching_events, record_of, find_event
):
    """DDP with gradient accumulation holds gradients twice in the first step: 16% more here."""
    predicted = plan.ranks[0]
    assert predicted.first_peak_bytes > predicted.peak_bytes * 1.05
    events = matching_events()
    state = find_event(events, "state", 0)
    state["peak_bytes"] = predicted.first_peak_bytes
    assert not audit_run(plan, record_of(events)).ok
    state["first_step"] = True
    assert audit_run(plan, record_of(events)).ok
    state["peak_bytes"] = predicted.peak_bytes
    assert not audit_run(plan, record_of(events)).ok


def test_a_rank_without_measurements_fails(plan, matching_events, record_of):
    events = [e for e in matching_events() if not (e["event"] == "state" and e["rank"] == 1)]
    audit = audit_run(plan, record_of(events))
    assert [d.split(" was not measured")[0] for d in audit.differences] == [
        f"rank 1: {kind}" for kind in ("parameters", "gradients", "optimizer", "activations", "peak")
    ]


def test_a_state_row_without_measurement_fails(plan, matching_events, record_of, find_event):
    events = matching_events()
    del find_event(events, "state", 0)["state_bytes"]["optimizer"]
    (difference,) = audit_run(plan, record_of(events)).differences
    assert difference.startswith("rank 0: optimizer was not measured")


def test_a_rank_without_reported_collectives_is_named(plan, matching_events, record_of):
    events = [e for e in matching_events() if not (e["event"] == "collectives" and e["rank"] == 1)]
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
def test_an_unfinished_run_fails_with_one_difference(plan, matching_events, record_of, gone, says):
    audit = audit_run(plan, record_of([e for e in matching_events() if e["event"] not in gone]))
    (difference,) = audit.differences
    assert says in difference
    assert not audit.ok
    assert audit.measured is ("state" not in gone)


def test_an_unfinished_run_still_lists_measured_differences(plan, matching_events, record_of, find_event):
    events = [e for e in matching_events() if e["event"] not in ("finished", "collectives")]
    find_event(events, "state", 1)["state_bytes"]["optimizer"] += 1
    first, second = audit_run(plan, record_of(events)).differences
    assert first.startswith("rank 1: optimizer is ")
    assert "did not finish" in second


@pytest.mark.parametrize(
    ("also", "says"), [((), "memory was not measured"), (("collectives",), "nothing was")]
)
def test_a_run_interrupted_before_the_audited_step_fails_with_one_difference(
    plan, matching_events, record_of, also, says
):
    events = [e for e in matching_events() if e["event"] not in ("state", *also)]
    events = [{**e, "status": "interrupted"} if e["event"] == "finished" else e for e in events]
    audit = audit_run(plan, record_of(events))
    (difference,) = audit.differences
    assert difference.startswith(f"stopped before the audited step: {says}")
    assert (audit.ok, audit.measured) == (False, False)


def test_an_empty_record_fails(plan, record_of):
    assert len(audit_run(plan, record_of([])).differences) == 1


def test_a_state_row_predicted_as_zero_passes_only_for_zero():
    assert StateRow(0, "gradients", 0, 0).ok
    assert not StateRow(0, "gradients", 0, 1).ok
    assert not StateRow(0, "gradients", 0, None).ok


def test_the_json_audit_has_the_verdict_of_every_row(plan, matching_events, record_of, find_event):
    events = matching_events()
    find_event(events, "state", 1)["state_bytes"]["optimizer"] += 1
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
        "dropped_rows",
    }


# Ranks of a pipeline


def test_each_pipeline_rank_is_compared_with_its_own_prediction(pipeline_plan, events_of, record_of):
    audit = audit_run(pipeline_plan, record_of(events_of(pipeline_plan)))
    assert audit.ok, audit.differences
    sends = [row for row in audit.collectives if (row.axis, row.phase) == ("pp", "eval")]
    assert [row.pp_rank for row in sends] == [0], "the last pp rank sends nothing in an evaluation"
    assert "pp_rank" not in audit.as_dict()["collectives"][0], "control: the same prediction for all pp ranks"


def test_an_extra_pipeline_send_is_named_with_its_axis_and_phase(
    pipeline_plan, events_of, record_of, find_event
):
    events = events_of(pipeline_plan)
    row = next(
        r for r in find_event(events, "collectives", 1)["rows"] if (r["axis"], r["phase"]) == ("pp", "step")
    )
    row["calls"] += 1
    [difference] = audit_run(pipeline_plan, record_of(events)).differences
    assert "axis pp, send in phase step" in difference


def test_a_pipeline_rank_with_the_collectives_of_another_one_fails(
    pipeline_plan, events_of, record_of, find_event
):
    """The prediction of pp rank 0 does not excuse calls of pp rank 1."""
    events = events_of(pipeline_plan)
    find_event(events, "collectives", 1)["rows"] = find_event(events, "collectives", 0)["rows"]
    differences = audit_run(pipeline_plan, record_of(events)).differences
    assert any(text.startswith("pp rank 1, axis pp, send in phase eval") for text in differences)
