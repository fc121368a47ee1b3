"""``meshwright audit``: exit status and output for complete, edited and damaged run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def edit_event(folder: Path, name: str, rank: int, change) -> None:
    """Change one event of the run."""
    log = folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == name and event["rank"] == rank:
            change(event)
    log.write_text("".join(json.dumps(event) + "\n" for event in events))


def add_call(event):
    event["rows"].append(
        {"axis": "tp", "op": "all_gather", "phase": "step", "ranks": 2, "calls": 1, "bytes": 8}
    )


def more_bytes(event):
    event["rows"][2]["bytes"] += 1


def test_a_run_that_matches_its_plan_exits_0(cli, run_dir):
    ran = cli("audit", run_dir)
    assert ran.status == 0
    assert "Audit: ok." in ran.out
    assert "DIFFERS" not in ran.out
    assert "not audited" in ran.out


def test_audit_json_is_one_object(cli, run_dir):
    found = cli("audit", run_dir, "--json").json
    assert found["audit_ok"] is True
    assert found["differences"] == []
    assert (found["status"], found["run_dir"]) == ("complete", str(run_dir))
    assert len(found["state"]) == 10
    assert len(found["collectives"]) == 4


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "collectives",
            add_call,
            "axis tp, all_gather in phase step: 1 calls and 8 bytes, predicted 0 and 0",
        ),
        ("collectives", more_bytes, "axis dp_replicate, all_reduce in phase step"),
        ("state", lambda e: e["state_bytes"].update(optimizer=1), "rank 1: optimizer is 1 bytes"),
        ("state", lambda e: e.update(peak_bytes=2 * e["peak_bytes"]), "rank 1: peak is 4745928 bytes"),
        ("state", lambda e: e.update(event="other"), "rank 1: parameters was not measured"),
        ("collectives", lambda e: e.update(event="other"), "rank 1 did not report its collectives"),
    ],
)
def test_an_edited_run_exits_3_and_names_the_difference(cli, run_dir, name, change, says):
    edit_event(run_dir, name, 1, change)
    ran = cli("audit", run_dir)
    assert ran.status == 3
    (line,) = [text for text in ran.out.splitlines() if says in text and text.startswith("Audit: ")]
    assert line.endswith("[audit-differs]")
    assert "Audit: ok" not in ran.out


def test_an_edited_run_with_json_exits_3_with_the_difference(cli, run_dir):
    edit_event(run_dir, "collectives", 0, more_bytes)
    ran = cli("audit", run_dir, "--json")
    assert ran.status == 3
    assert ran.json["audit_ok"] is False
    assert len(ran.json["differences"]) == 1


def test_an_edited_plan_exits_3(cli, run_dir):
    plan = run_dir / "plan.toml"
    plan.write_text(plan.read_text().replace("optimizer = 756304", "optimizer = 756300", 1))
    ran = cli("audit", run_dir)
    assert ran.status == 3
    assert "rank 0: optimizer is 756304 bytes, predicted 756300" in ran.out


def test_a_log_with_a_truncated_last_line_is_audited_and_noted(cli, run_dir):
    with (run_dir / "events.jsonl").open("a") as log:
        log.write('{"event":"fini')
    ran = cli("audit", run_dir)
    assert ran.status == 0
    assert "1 lines of events.jsonl are truncated" in ran.out


def test_a_damaged_event_exits_3_without_a_traceback(cli, run_dir):
    edit_event(run_dir, "state", 1, lambda event: event.pop("state_bytes"))
    assert cli("audit", run_dir).status == 3


@pytest.mark.parametrize(
    ("status", "says", "word"),
    [
        (None, "the run did not finish: not measured on every rank: memory and collectives", "-"),
        ("interrupted", "stopped before the audited step: nothing was measured", "not measured"),
    ],
)
def test_a_run_without_measurements_has_one_difference(cli, run_dir, status, says, word):
    """Exit status 3 with one line instead of one per prediction.

    ``runs`` does not list it as a difference.
    """
    log = run_dir / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kept = [
        e for e in events if e["event"] not in ("state", "collectives", *(() if status else ("finished",)))
    ]
    log.write_text("".join(json.dumps({**e, "status": status} if "status" in e else e) + "\n" for e in kept))
    ran = cli("audit", run_dir)
    assert ran.status == 3
    assert [t for t in ran.out.splitlines() if t.startswith("Audit: ")] == [
        f"Audit: {says} [audit-incomplete]"
    ]
    assert "DIFFERS" not in ran.out
    assert f"  {word}  " in cli("runs", run_dir).out


def test_the_audit_of_a_failed_run_has_status_failed(cli, run_dir):
    log = run_dir / "events.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"finished"' not in line]
    error = {"v": 1, "event": "error", "time": 0.0, "rank": 1, "generation": 0, "message": "out of memory"}
    log.write_text("\n".join([*lines, json.dumps(error)]) + "\n")
    ran = cli("audit", run_dir, "--json")
    assert (ran.status, ran.json["status"], ran.json["audit_ok"]) == (3, "failed", False)


@pytest.mark.parametrize(("remove", "code"), [("events.jsonl", "run-missing"), ("plan.toml", "plan-missing")])
def test_a_run_folder_with_a_missing_file_exits_2(cli, run_dir, remove, code):
    (run_dir / remove).unlink()
    ran = cli("audit", run_dir, "--json")
    assert ran.status == 2
    assert ran.codes == [code]
    assert ran.json["errors"][0]["code"] == code


def test_a_missing_folder_exits_2(cli):
    ran = cli("audit", "gone")
    assert (ran.status, ran.codes) == (2, ["run-missing"])


def test_a_plan_of_another_version_exits_2(cli, run_dir):
    plan = run_dir / "plan.toml"
    plan.write_text(plan.read_text().replace("meshwright_plan = 1", "meshwright_plan = 9"))
    ran = cli("audit", run_dir)
    assert (ran.status, ran.codes) == (2, ["plan-version"])


def test_a_failed_run_that_matches_so_far_is_incomplete_and_not_different(cli, run_dir):
    """The report says the same: rows that were measured have a verdict."""
    log = run_dir / "events.jsonl"
    lines = [line for line in log.read_text().splitlines() if '"finished"' not in line]
    log.write_text("\n".join(lines) + "\n")
    ran = cli("audit", run_dir)
    assert ran.status == 3
    says = "the run did not finish; what was measured matches the plan [audit-incomplete]"
    assert [t for t in ran.out.splitlines() if t.startswith("Audit: ")] == [f"Audit: {says}"]
    assert "equal" in ran.out
    assert cli("audit", run_dir, "--json").json["incomplete"] == "the run did not finish"
    assert "what was measured matches the plan" in cli("report", run_dir).out
    assert "not audited" not in (run_dir / "report.html").read_text().replace("(not audited)", "")
