"""The audit of a run with several generations and attempts: all of them are compared with their plan."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import RunScan, read_record
from meshwright.plan.build import build_plan

LOST = {"v": 1, "event": "rank_lost", "time": 5.0, "rank": 0, "failed_rank": 1, "how": "killed by SIGKILL"}


@pytest.fixture
def plan(make_job):
    """Two DDP replicas on CPUs, where losses are bit-identical."""
    return build_plan(make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}, cluster={"device": "cpu"}))[0]


@pytest.fixture
def regrouped(matching_events, record_of):
    """The record of a run whose generation 0 lost rank 1; ``change`` edits the events of both generations."""

    def build(change=lambda before, after: None, without_dead=True):
        before, after = matching_events(0), matching_events(1)
        if without_dead:  # a killed process reports nothing
            before = [e for e in before if (e["event"], e["rank"]) != ("collectives", 1)]
        before = [e for e in before if e["event"] != "finished"]
        change(before, after)
        return record_of([*before, {**LOST, "generation": 0}, *after])

    return build


def rows_of(audit):
    return {(r.axis, r.op, r.phase): (r.calls, r.predicted_calls, r.generation) for r in audit.collectives}


def test_collectives_of_all_generations_are_added_up(plan, regrouped, matching_events, record_of):
    """The surviving rank counted both generations: setup twice, and the replayed steps too."""
    once = rows_of(audit_run(plan, record_of(matching_events())))
    audit = audit_run(plan, regrouped())
    assert audit.ok, audit.differences
    assert audit.generations == 2
    assert rows_of(audit) == {kind: (2 * calls, 2 * calls, None) for kind, (calls, _, _) in once.items()}
    assert audit.coverage == ("generation 0: rank 1 ended without a report of its collectives",)


def test_one_more_call_in_an_earlier_generation_fails(plan, regrouped, find_event):
    def change(before, after):
        find_event(before, "collectives", 0)["rows"][0]["calls"] += 1

    audit = audit_run(plan, regrouped(change))
    (difference,) = audit.differences
    assert difference.startswith("generation 0, axis ")


def test_errors_that_cancel_out_over_generations_fail(plan, regrouped, find_event):
    def change(before, after):
        find_event(before, "collectives", 0)["rows"][0]["calls"] += 1
        find_event(after, "collectives", 0)["rows"][0]["calls"] -= 1

    assert len(audit_run(plan, regrouped(change)).differences) == 1


def test_memory_of_an_earlier_generation_is_audited(plan, regrouped, find_event):
    def change(before, after):
        find_event(before, "state", 0)["state_bytes"]["optimizer"] += 4

    audit = audit_run(plan, regrouped(change))
    (difference,) = audit.differences
    assert difference.startswith("generation 0, rank 0: optimizer is ")
    assert [row.generation for row in audit.state if not row.ok] == [0]
    assert len([row for row in audit.state if row.generation is None]) == 10, "the newest has all its rows"


def change_loss(before, after):
    next(e for e in after if e["event"] == "step" and e["step"] == 3)["loss"] += 1e-6


def test_a_replayed_step_with_another_loss_fails(plan, regrouped):
    audit = audit_run(plan, regrouped(change_loss))
    (difference,) = audit.differences
    assert difference == "replayed step 3 has another loss: 3.000001 in generation 1, 3.0 before"


def test_equal_losses_are_not_required_on_gpus_without_deterministic_kernels(plan, regrouped):
    gpu = dataclasses.replace(plan.job.cluster, device="cuda")
    job = dataclasses.replace(plan.job, cluster=gpu)
    assert audit_run(dataclasses.replace(plan, job=job), regrouped(change_loss)).ok
    strict = dataclasses.replace(job, train=dataclasses.replace(job.train, deterministic=True))
    assert not audit_run(dataclasses.replace(plan, job=strict), regrouped(change_loss)).ok


@pytest.mark.parametrize(("notes", "ok"), [([], False), (["the sharding was dp_shard=2"], True)])
def test_a_resume_that_changes_the_curve_may_have_other_losses(plan, matching_events, record_of, notes, ok):
    before, after = matching_events(0), matching_events(1)
    change_loss(before, after)
    resumed = {"v": 1, "event": "resumed", "time": 1.0, "rank": 0, "generation": 1, "step": 0, "notes": notes}
    record = record_of([*before, resumed, *after])
    assert audit_run(plan, record, {0: plan}).ok is ok


def test_an_earlier_attempt_is_audited_against_its_own_plan(plan, make_job, events_of, record_of):
    """The first attempt ran in one process. Without its plan it is not audited, and the audit says so."""
    alone, _ = build_plan(make_job(layout={"dp_replicate": 1}, cluster={"device": "cpu"}))
    record = record_of([*events_of(alone, 0), *events_of(plan, 1)])
    with_plan = audit_run(plan, record, {0: alone})
    assert (with_plan.ok, with_plan.generations, with_plan.coverage) == (True, 2, ())
    assert audit_run(plan, record, {0: plan}).coverage != (), "its second rank reported nothing"
    without = audit_run(plan, record)
    assert (without.ok, without.generations) == (True, 1)
    assert without.coverage == ("generation 0 is not audited: its plan is not in the run folder",)


def test_a_run_that_was_stopped_between_two_layouts_is_audited_against_the_plan_that_ran(
    plan, make_job, events_of, record_of
):
    """``plan.toml`` is already that of the next layout, of which no rank has started."""
    following, _ = build_plan(make_job(layout={"dp_replicate": 1}, cluster={"device": "cpu"}))
    changed = {"v": 1, "event": "layout_changed", "time": 9.0, "rank": 0, "generation": 0, "step": 3}
    changed |= {"reason": "a node is lost", "layout": {}, "ranks_before": 2, "ranks": 1}
    audit = audit_run(following, record_of([*events_of(plan, 0), changed]), {0: plan})
    assert audit.ok, audit.differences
    assert {row.rank for row in audit.state} == {0, 1}


def test_the_run_list_folds_the_same_record(plan, matching_events, run_folder):
    """It reads of each step only loss and time."""
    before, after = matching_events(0), matching_events(1)
    change_loss(before, after)
    folder = run_folder([*before, {**LOST, "generation": 0}, *after])
    scan = RunScan()
    assert scan.read(folder / "events.jsonl") == 0
    whole = read_record(folder)
    assert scan.record.losses == whole.losses
    assert scan.record.steps.differences == whole.steps.differences
    assert scan.record.goodput == whole.goodput
    assert audit_run(plan, scan.record).differences == audit_run(plan, whole).differences
