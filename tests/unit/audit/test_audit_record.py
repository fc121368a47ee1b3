"""The run record: built from events, one attempt at a time; damaged logs are tolerated."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import read_record
from meshwright.audit.record import RunRecord
from meshwright.core.errors import UserError
from meshwright.plan.contract import read_plan

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1"


def test_a_record_read_from_disk_equals_the_live_one(matching_events, record_of, run_folder):
    assert read_record(run_folder(matching_events())) == record_of(matching_events())


def test_a_record_has_the_losses_of_rank_0_and_measurements_of_every_rank(matching_events, record_of):
    record = record_of(matching_events())
    assert record.losses == [5.0, 4.0, 3.0, 2.0]
    assert record.eval_loss == 5.5
    assert record.status == "complete"
    assert record.peak_basis == "a matmul"
    assert set(record.state) == set(record.collectives) == {0, 1}


def test_rates_come_from_the_median_step_without_the_first_two():
    record = RunRecord(tokens_per_step=10)
    for step, (seconds, mfu) in enumerate(((100.0, 0.0), (50.0, 0.0), (1.0, 0.1), (2.0, 0.2), (3.0, 0.9)), 1):
        record.steps.add(step, 0, 1.0, seconds, mfu)
    assert record.tokens_per_s == 5.0
    assert record.mfu == 0.2
    plan = read_plan(GOLDEN / "plan.toml")
    assert record.flops_per_s(plan) == 5.0 * plan.flops_per_token
    assert RunRecord().flops_per_s(plan) is None, "no step, no rate"


def test_short_runs_use_all_steps_for_rates_and_empty_runs_have_none():
    record = RunRecord(tokens_per_step=10)
    record.steps.add(1, 0, 1.0, 2.0, 0.5)
    assert (record.tokens_per_s, record.mfu) == (5.0, 0.5)
    assert RunRecord().tokens_per_s is None
    assert RunRecord().mfu is None


def test_an_unknown_event_is_ignored(record_of):
    record, empty = record_of([{"event": "something_new", "rank": 0}]), RunRecord()
    assert (record.status, record.losses, record.notes) == (empty.status, [], [])


def test_failures_and_notes_are_recorded_for_the_report(record_of):
    record = record_of(
        [
            {"event": "checkpoint_failed", "rank": 0, "step": 3, "reason": "disk full"},
            {"event": "events_lost", "rank": 1, "count": 5},
            {"event": "events_lost", "rank": 1, "count": 2},
            {"event": "no_evaluation", "rank": 0, "reason": "too short"},
            *({"event": "gemm_autotune_skipped", "rank": rank, "reason": "no GPU"} for rank in (0, 1)),
            {"event": "resumed", "rank": 0, "notes": ["2 ranks before"]},
            {"event": "checkpoint", "rank": 0, "step": 3, "path": "c/step-3", "seconds": 1.0},
        ]
    )
    assert record.checkpoint_failures == ["step 3: disk full"]
    assert not record.last_checkpoint_failed, "a later one was written"
    assert record.events_lost == {1: 5}
    assert record.notes == ["no evaluation: too short", "no GEMM autotuning: no GPU", "2 ranks before"]
    assert record.checkpoint == "c/step-3"
    assert record.status == "unfinished"


def test_a_step_without_targets_differs_from_one_with_a_nonfinite_loss(matching_events, run_folder):
    change = {1: {"loss": None, "tokens": 0}, 3: {"loss": None}, 4: {"loss": None, "tokens": 0}}
    events = [{**e, **change.get(e["step"], {})} if e["event"] == "step" else e for e in matching_events()]
    record = read_record(run_folder(events))
    assert (record.losses[0], record.losses[1], record.losses[3]) == (None, 4.0, None)
    assert math.isnan(record.losses[2])
    assert len(record.target_losses) == 2
    assert record.targetless_text().startswith("2 of 4 steps had no target tokens")
    assert record.tokens_per_step == 256, "taken from a step with targets"
    assert read_record(run_folder(matching_events())).targetless_text() == ""


def test_a_run_failed_if_a_rank_reports_an_error_and_none_finished(matching_events, record_of):
    error = {"event": "error", "rank": 1}
    assert record_of([*matching_events()[:3], error]).outcome == "failed"
    assert record_of(matching_events()[:3]).outcome == "unfinished"
    assert record_of([*matching_events(), error]).outcome == "complete"


def test_a_folder_without_events_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        read_record(tmp_path / "gone")
    (problem,) = caught.value.problems
    assert problem.code == "run-missing"
    assert str(tmp_path / "gone") in str(problem)
    assert problem.fix


def test_a_file_instead_of_a_run_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError) as caught:
        read_record(tmp_path / "run")
    assert caught.value.problems[0].code == "run-missing"


# Attempts


def test_each_step_counts_as_the_last_generation_did_it(matching_events, run_folder):
    """The second attempt resumes after step 2. Its losses of steps 3 and 4 replace those before."""
    old, new = matching_events(generation=0), matching_events(generation=1)
    new = [e for e in new if e["event"] != "step" or e["step"] > 2]
    for event in new:
        if event["event"] == "step":
            event["loss"] = 1.0
        if event["event"] == "ready":
            event["step"] = 2
    record = read_record(run_folder(old + new))
    assert record.losses == [5.0, 4.0, 1.0, 1.0]
    assert (record.first_step, record.attempt_step, record.furthest_step) == (0, 2, 4)
    assert (record.steps.replayed, record.steps.replayed_s) == (2, 1.0)
    assert [(d.step, d.loss, d.before) for d in record.steps.differences] == [(3, 1.0, 3.0), (4, 1.0, 2.0)]


def test_steps_after_a_failure_are_of_the_same_attempt(matching_events, run_folder):
    """Generation 0 loses a rank, generation 1 goes on, and a resume is generation 2."""
    lost = {
        "v": 1,
        "event": "rank_lost",
        "time": 1.0,
        "rank": 0,
        "generation": 0,
        "failed_rank": 1,
        "how": "x",
    }
    events = [*matching_events(0), lost, *matching_events(1), *matching_events(2)]
    record = read_record(run_folder(events))
    found = [(g.generation, g.attempt_start, g.attempt) for g in record.generations.values()]
    assert found == [(0, 0, 0), (1, 0, 0), (2, 2, 1)]
    assert record.steps.replayed == 8
    assert record.steps.differences == []


def test_a_late_line_of_a_replaced_generation_does_not_count(matching_events, run_folder):
    """A process that was stopped wakes up and writes a step of the generation that went on without it."""
    late = {**matching_events(0)[4], "loss": 99.0}
    assert late["event"] == "step"
    record = read_record(run_folder([*matching_events(0), *matching_events(1), late]))
    assert record.losses == [5.0, 4.0, 3.0, 2.0]
    assert record.steps.replayed == 4


def test_steps_that_were_not_recorded_leave_a_gap():
    """A full disk lost step 2; step 1 comes from a resume that began earlier."""
    record = RunRecord()
    for step in (3, 1, 4):
        record.steps.add(step, 0, float(step), 0.5, 0.1)
    assert (list(record.steps.numbers), record.losses) == ([1, 3, 4], [1.0, 3.0, 4.0])
    assert list(record.steps.seconds[record.steps.since(1)]) == [0.5, 0.5]


def test_attempts_with_interleaved_lines_are_separated(matching_events, run_folder):
    mixed = [event for pair in zip(matching_events(0), matching_events(1), strict=True) for event in pair]
    assert read_record(run_folder(mixed)).losses == [5.0, 4.0, 3.0, 2.0]


def test_an_unfinished_newest_attempt_is_not_replaced_by_a_finished_older_one(
    plan, matching_events, run_folder
):
    """Only the newest attempt counts."""
    record = read_record(run_folder(matching_events(0) + matching_events(1)[:3]))
    assert record.status == "unfinished"
    assert not audit_run(plan, record).ok


# Damage


def test_truncated_lines_are_skipped_and_noted(matching_events, run_folder):
    folder = run_folder(matching_events())
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"event":"st')
    record = read_record(folder)
    assert record.losses == [5.0, 4.0, 3.0, 2.0]
    assert record.notes == ["1 lines of events.jsonl are truncated or of another version, and were skipped"]


def test_an_event_with_a_missing_key_is_skipped_and_noted(matching_events, run_folder):
    events = matching_events()
    del events[1]["loss"]
    record = read_record(run_folder(events))
    assert len(record.losses) == 3
    assert len(record.notes) == 1
    assert "'step'" in record.notes[0]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("state", "state_bytes", None),
        ("state", "peak_bytes", None),
        ("state", "state_bytes", 5),
        ("state", "peak_bytes", "many"),
        ("collectives", "rows", None),
        ("collectives", "steps", None),
        ("collectives", "evaluations", None),
        ("collectives", "rows", [{"axis": "dp_replicate"}]),
        ("collectives", "rows", 5),
    ],
)
def test_a_damaged_measurement_fails_the_audit_without_a_traceback(
    plan, matching_events, run_folder, find_event, name, key, value
):
    """A log may be edited by hand or written by another version."""
    events = matching_events()
    event = find_event(events, name, 0)
    if value is None:
        del event[key]
    else:
        event[key] = value
    assert not audit_run(plan, read_record(run_folder(events))).ok


def test_a_generation_that_is_not_a_number_causes_no_traceback(matching_events, run_folder):
    events = matching_events()
    events[1]["generation"] = "first"
    assert read_record(run_folder(events)).losses[-3:] == [4.0, 3.0, 2.0]


# The golden run


def test_a_run_folder_of_version_1_is_readable_and_passes_the_audit():
    record = read_record(GOLDEN)
    assert record.status == "complete"
    assert record.losses == pytest.approx([5.728075, 5.672234, 5.607332, 5.587459], abs=1e-6)
    assert record.eval_loss == pytest.approx(5.583890, abs=1e-4)
    assert record.notes == []
    audit = audit_run(read_plan(GOLDEN / "plan.toml"), record)
    assert audit.differences == ()
    measured = {row.kind: row.measured for row in audit.state if row.rank == 1}
    state = {"parameters": 378_112, "gradients": 378_112, "optimizer": 756_304}
    assert measured == {**state, "activations": 691_464, "peak": 2_372_964}
