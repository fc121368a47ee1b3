"""The run report: curves over all attempts, the audit, and no markup from files."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.plan.contract import PLAN_FILE, read_plan, write_plan
from meshwright.report.history import read_history
from meshwright.report.html import draw_page, write_page
from meshwright.report.run_report import read_report
from meshwright.report.text_plot import x_axis

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1"


class PageParser(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(page: str) -> PageParser:
    """The parsed page."""
    reader = PageParser()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_report_of_a_version_1_run_is_complete():
    page = read_page(draw_page(read_report(GOLDEN)))
    for words in ("Loss", "Throughput", "Learning rate", "Gradient norm", "Memory", "Audit", "Collectives"):
        assert words in page.text, words
    report = read_report(GOLDEN)
    assert report.audit.ok
    for row in report.audit.state:
        assert f"{row.predicted:,}" in page.text
    for row in report.audit.collectives:
        assert f"{row.predicted_bytes:,}" in page.text
    assert 'preset = "tiny"' in page.text, "the page ends with the job"


def test_page_is_self_contained(matching_events, run_folder):
    """It has no script, style sheet, image or URL to fetch."""
    page = draw_page(read_report(run_folder(matching_events())))
    reader = read_page(page)
    assert set(reader.tags) & {"script", "link", "img", "iframe", "object"} == set()
    addresses = [value for value in reader.values if "//" in value]
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, (
        "XML namespaces are not fetched"
    )
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_text_from_files_is_escaped(matching_events, run_folder, find_event):
    """Checkpoint path, error, note, field name and host contain markup."""
    evil = '"><script>alert(1)</script>'
    events = matching_events()
    head = {"v": 1, "time": 1.0, "rank": 0, "generation": 0}
    events.insert(0, {**head, "event": "started", "pid": 1, "host": evil, "torch": evil})
    events.insert(1, {**head, "event": "resumed", "checkpoint": evil, "step": 0, "notes": [evil]})
    events.append({**head, "event": "checkpoint_failed", "step": 4, "reason": evil})
    events.append({**head, "event": "checkpoint", "step": 4, "path": evil, "bytes": 1, "seconds": 1.0})
    events.append(
        {**head, "event": "error", "message": evil, "kind": evil, "problems": [], "peer_lost": False}
    )
    for event in events:
        if event["event"] == "step":
            event[evil] = 1.0
    find_event(events, "collectives", 0)["rows"][0]["axis"] = evil
    page = draw_page(read_report(run_folder(events)))
    reader = read_page(page)
    assert "script" not in reader.tags
    assert "<script" not in page
    assert evil in reader.text


def test_attempts_are_drawn_with_restart_marks(matching_events, run_folder):
    """The second attempt starts at step 2. The chart has both segments and a mark between them."""
    late = [e for e in matching_events(generation=1) if not (e["event"] == "step" and e["step"] <= 2)]
    resumed = {"v": 1, "time": 1.0, "rank": 0, "generation": 1, "event": "resumed", "step": 2}
    report = read_report(run_folder([*matching_events(), {**resumed, "checkpoint": "c", "notes": []}, *late]))
    loss = report.loss_chart()
    assert [[x for x, _ in s] for s in loss.series[0].segments] == [[1, 2, 3, 4], [3, 4]]
    assert loss.marks == ((2.0, "restart 1 at step 2"),)
    assert [a["resumed_at"] for a in report.as_dict()["attempts"]] == [None, 2]
    assert "restart 1 at step 2" in draw_page(report)


def test_the_timeline_of_several_generations_is_above_the_curves(matching_events, run_folder):
    """A run of one generation has none."""
    events = [*matching_events(), *matching_events(generation=1)]
    for seconds, event in enumerate(events):
        event["time"] = float(seconds)
    page = draw_page(read_report(run_folder(events)))
    assert 0 < page.find("<h2>Timeline</h2>") < page.find("<h2>Curves</h2>") < page.find("<h2>Goodput</h2>")
    assert "generation 1" in page
    assert "<h2>Timeline</h2>" not in draw_page(read_report(run_folder(matching_events())))


def test_unknown_numeric_fields_are_drawn(matching_events, run_folder):
    """A number that only some steps have is drawn. Text and lists are not."""
    events = matching_events()
    for event in events:
        if event["event"] == "step":
            event |= {"skipped": event["step"] == 2, "comment": "text", "rows": [1], "lr": None}
            if event["step"] > 2:
                event["noise_scale"] = 10.0 * event["step"]
    history = read_history(run_folder(events))
    assert history.fields() == ["loss", "mfu", "skipped", "noise_scale"]
    charts = {c.title: c for c in read_report(run_folder(events)).small_charts()}
    assert list(charts["Gradient noise scale"].series[0].points()) == [(3.0, 30.0), (4.0, 40.0)]
    assert [y for _, y in charts["Skipped steps"].series[0].points()] == [0, 1, 0, 0]


def test_warnings_name_lost_events_checkpoints_and_audit_failures(matching_events, run_folder, find_event):
    events = matching_events()
    find_event(events, "state", 0)["state_bytes"]["parameters"] += 4
    head = {"v": 1, "time": 1.0, "rank": 1, "generation": 0}
    events.append({**head, "event": "events_lost", "count": 7})
    events.append({**head, "rank": 0, "event": "checkpoint_failed", "step": 2, "reason": "No space left"})
    folder = run_folder(events)
    with (folder / "events.jsonl").open("a") as file:
        file.write("torn\n")
    warnings = "\n".join(read_report(folder).warnings())
    for words in (
        "rank 1 lost 7",
        "step 2: No space left",
        "1 line of events.jsonl",
        "rank 0: parameters is",
    ):
        assert words in warnings


def test_unfinished_run_is_reported_without_a_verdict(matching_events, run_folder):
    report = read_report(run_folder([e for e in matching_events() if e["event"] == "ready"]))
    assert report.status == "unfinished"
    assert report.as_dict()["audit"] is None
    page = read_page(draw_page(report)).text
    assert "No step was completed" in page
    assert "Audit: incomplete" in page


def test_non_finite_loss_is_reported(matching_events, run_folder):
    events = [
        {**e, "loss": None} if e["event"] == "step" and e["step"] == 4 else e for e in matching_events()
    ]
    report = read_report(run_folder(events))
    assert "not finite" in dict(report.facts())["Loss"]
    assert "loss not finite at step 4" in report.notes()


@pytest.mark.parametrize(
    ("empty", "fact"), [({2, 4}, "5.0000 to 3.0000"), ({1, 2, 3, 4}, "no step had target")]
)
def test_steps_without_targets_are_noted_and_not_drawn(matching_events, run_folder, empty, fact):
    gone = {"loss": None, "tokens": 0}
    events = [{**e, **gone} if e["event"] == "step" and e["step"] in empty else e for e in matching_events()]
    report = read_report(run_folder(events))
    assert dict(report.facts())["Loss"].startswith(fact)
    assert not [note for note in report.notes() if "not finite" in note]
    assert [note for note in report.notes() if note.startswith(f"{len(empty)} of 4 steps had no target")]
    drawn = {x for x, _ in report.loss_chart().series[0].points()}
    assert drawn == {1.0, 2.0, 3.0, 4.0} - {float(step) for step in empty}
    assert report.as_dict()["loss"] == (None if len(empty) == 4 else 3.0)
    charts = [report.loss_chart(), report.rate_chart(), *report.small_charts()]
    assert {(x_axis(c).low, x_axis(c).high) for c in charts} == {(1, 4)}, "the x axis includes the last step"
    assert "nan" not in re.sub(r"<style>.*?</style>", "", draw_page(report), flags=re.DOTALL)
    assert json.dumps(report.as_dict())


def test_page_is_written_atomically(matching_events, run_folder, tmp_path):
    report = read_report(run_folder(matching_events()))
    page = tmp_path / "out.html"
    write_page(report, page)
    assert page.read_text().endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
    with pytest.raises(UserError) as caught:
        write_page(report, tmp_path / "missing" / "out.html")
    assert caught.value.problems[0].code == "report-not-writable"


def test_pipeline_report_shows_stages_and_their_memory(pipeline_plan, events_of, tmp_path):
    write_plan(pipeline_plan, tmp_path / PLAN_FILE)
    lines = [json.dumps(event) + "\n" for event in events_of(pipeline_plan)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    page = draw_page(read_report(tmp_path))
    for words in ("<h2>Stages</h2>", "embedding", "head", "Predicted for stage 1 (rank 1)", "pp, pp rank 0"):
        assert words in page
    assert f"{pipeline_plan.pipeline.bubble:.1%}" in page


def test_report_without_matplotlib_has_a_note_instead_of_curves(monkeypatch):
    monkeypatch.setattr("meshwright.report.html.can_draw", lambda: False)
    page = read_page(draw_page(read_report(GOLDEN)))
    assert "svg" not in page.tags
    assert "Curves need matplotlib: install meshwright[plots]" in page.text
    assert "Collectives" in page.text


def test_the_report_names_backup_replicas_and_counts_their_slices(matching_events, run_folder):
    """A slice is no curve. Ranks other than 0 count too, though their steps are not read otherwise."""
    events = matching_events()
    given = {0: [0, None, None, 0], 1: [None, 0, 0, None]}
    steps = [event for event in events if event["event"] == "step" and event["rank"] == 0]
    for event in steps:
        event["slice"] = given[0][event["step"] - 1]
        events.append({**event, "rank": 1, "slice": given[1][event["step"] - 1]})
    folder = run_folder(events)
    plan = read_plan(folder / PLAN_FILE)
    layout = dataclasses.replace(plan.job.layout, tp=1, dp_replicate=2, backup_replicas=1)
    job = dataclasses.replace(plan.job, layout=layout)
    report = dataclasses.replace(read_report(folder), plan=dataclasses.replace(plan, job=job))
    assert "slice" not in report.history.fields()
    facts = dict(report.facts())
    assert "layout.backup_replicas=1" in facts["Layout"]
    assert (
        facts["Backup replicas"] == "2 of 4 slices from backups; rank 0 was late most often, in 2 of 4 steps"
    )
    assert report.as_dict()["backup_replicas"] == [
        {"rank": 0, "backup": False, "own": 2, "taken_over": 0, "unused": 2},
        {"rank": 1, "backup": True, "own": 0, "taken_over": 2, "unused": 2},
    ]
    assert "another rank's slice used" in read_page(draw_page(report)).text
    assert read_report(run_folder(matching_events())).slices == []


def test_an_error_that_follows_from_another_is_no_warning(matching_events, run_folder):
    head = {"v": 1, "time": 1.0, "generation": 0, "event": "error", "kind": "Error", "problems": []}
    closed = {**head, "rank": 1, "message": "Connection closed by peer", "peer_lost": True}
    cause = {**head, "rank": 0, "message": "the data differ", "peer_lost": False}
    both = read_report(run_folder([*matching_events(), closed, cause])).warnings()
    assert "rank 0: the data differ" in both
    assert not any("closed by peer" in text for text in both)
    alone = read_report(run_folder([*matching_events(), closed])).warnings()
    assert "rank 1: Connection closed by peer" in alone, "better than no reason at all"
