"""The list of runs: every state of a run, and constant parsing cost for long logs."""

from __future__ import annotations

import json

import pytest

from meshwright.audit import event_scan as scan
from meshwright.audit.event_scan import read_record
from meshwright.core.events import EVENTS_FILE, EventWriter
from meshwright.launch.lock import RunLock, is_held
from meshwright.report.run_list import list_runs, summarize_run


def test_finished_run_has_the_figures_of_its_record(matching_events, run_folder):
    folder = run_folder(matching_events())
    run = summarize_run(folder)
    assert (run.status, run.steps, run.target_steps, run.ranks) == ("complete", 4, 4, 2)
    assert (run.loss, run.eval_loss, run.audit_ok) == (2.0, 5.5, True)
    assert run.tokens_per_s == read_record(folder).tokens_per_s
    assert run.size_bytes == sum(p.stat().st_size for p in folder.iterdir())


def test_failed_audit_is_shown(matching_events, run_folder, find_event):
    events = matching_events()
    find_event(events, "state", 1)["state_bytes"]["optimizer"] += 1
    assert summarize_run(run_folder(events)).audit_ok is False


def test_run_without_an_audited_step_is_not_measured(matching_events, run_folder):
    events = [{**e, "status": "interrupted"} if e["event"] == "finished" else e for e in matching_events()]
    folder = run_folder([e for e in events if e["event"] != "state"])
    run = summarize_run(folder)
    assert (run.status, run.audit_ok, run.measured) == ("interrupted", False, False)
    assert summarize_run(run_folder(matching_events())).measured is True


def test_figures_are_those_of_the_newest_attempt(matching_events, run_folder):
    late = [{**e, "loss": 1.25} if e["event"] == "step" else e for e in matching_events(generation=1)]
    run = summarize_run(run_folder(matching_events() + late))
    assert (run.attempts, run.loss) == (2, 1.25)


def test_states_of_unfinished_runs(matching_events, run_folder):
    """A run is unfinished, failed with the first cause, or running while its lock is held."""
    cut = [e for e in matching_events() if e["event"] in ("ready", "step")]
    folder = run_folder(cut)
    assert (summarize_run(folder).status, summarize_run(folder).audit_ok) == ("unfinished", None)
    with RunLock.take(folder):
        assert summarize_run(folder).status == "running"
    head = {"v": 1, "event": "error", "time": 0.0, "generation": 0, "kind": "RuntimeError", "problems": []}
    victim = {**head, "rank": 0, "message": "Connection closed by peer", "peer_lost": True}
    cause = {**head, "rank": 1, "message": "out of paper\nmore", "peer_lost": False}
    failed = summarize_run(run_folder([*cut, victim, cause]))
    assert (failed.status, failed.reason) == ("failed", "rank 1: out of paper")


def test_is_held_does_not_take_the_lock(tmp_path):
    assert not is_held(tmp_path), "no lock file"
    with RunLock.take(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    with RunLock.take(tmp_path):
        assert is_held(tmp_path), "is_held released the lock"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [("plan.toml", "not = [toml", "cannot be read"), ("plan.toml", None, "does not exist")],
)
def test_damaged_run_is_listed_with_the_reason(matching_events, run_folder, name, content, says):
    folder = run_folder(matching_events())
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    run = summarize_run(folder)
    assert run.status == "damaged"
    assert says in run.reason
    assert run.steps == 4, "readable figures are shown"


def test_damaged_event_lines_are_counted(matching_events, run_folder):
    folder = run_folder(matching_events())
    with (folder / EVENTS_FILE).open("a") as file:
        file.write('{"v":1,"event":"step","time":1.0,"rank":0,"generation":0,"step":9,"lo\nnonsense\n[]\n')
    run = summarize_run(folder)
    assert (run.status, run.steps) == ("complete", 4)
    assert "3 lines" in run.reason


def test_runs_are_listed_newest_first_without_other_folders(matching_events, run_folder, tmp_path):
    source = run_folder(matching_events())
    runs = tmp_path / "runs"
    for number, began in ((1, 100.0), (2, 300.0), (3, 200.0)):
        folder = runs / f"job-{number}"
        folder.mkdir(parents=True)
        (folder / "plan.toml").write_bytes((source / "plan.toml").read_bytes())
        lines = [json.dumps({**event, "time": began}) + "\n" for event in matching_events()]
        (folder / EVENTS_FILE).write_text("".join(lines))
    (runs / "notes").mkdir()
    (runs / "file.txt").write_text("x")
    assert [run.name for run in list_runs(runs)] == ["job-2", "job-3", "job-1"]
    assert [run.name for run in list_runs(runs / "job-1")] == ["job-1"]


def test_only_the_newest_step_of_a_long_log_is_parsed(matching_events, run_folder, monkeypatch):
    """The figures are correct."""
    folder = run_folder([])
    (folder / EVENTS_FILE).unlink()
    writers = [EventWriter(folder / EVENTS_FILE, rank) for rank in (0, 1)]
    for step in range(1, 2001):
        for writer in writers:
            facts = {"loss": 1.0 / step, "tokens": 100, "step_s": 0.5 if step < 1500 else 9.0, "mfu": 0.1}
            writer.write("step", step=step, **facts)
    for writer in writers:
        writer.write("finished", status="complete", step=2000, steps=2000)
    parsed = []
    real = scan.parse_event
    monkeypatch.setattr(scan, "parse_event", lambda line: parsed.append(1) or real(line))
    run = summarize_run(folder)
    assert len(parsed) == 3, "the newest step and two finished events"
    assert (run.steps, run.loss, run.tokens_per_s) == (2000, 1 / 2000, 200.0)
