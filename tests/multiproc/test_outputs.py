"""Output of real runs: the report page of complete and failed runs, the run list, and a scaling table."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from meshwright.cli.bench import bench_scaling
from meshwright.cli.output import Output
from meshwright.core.units import format_rate
from meshwright.plan.contract import PLAN_FILE, read_plan
from meshwright.report.run_list import summarize_run


def test_a_resumed_run_has_one_report_page_with_both_attempts(train, monkeypatch):
    """The run list has the values that the run reported."""
    monkeypatch.setattr("meshwright.report.html.can_draw", lambda: True)
    first = train("layout.dp_replicate=2", "run_dir=run", "train.steps=4")
    page = Path(first.result["report"])
    assert page == first.run_dir / "report.html"
    assert "restart 1" not in page.read_text()
    assert f"report: {page}" in first.messages
    second = train("layout.dp_replicate=2", "run_dir=run", "train.steps=6", resume=True)
    assert "restart 1 at step 4" in page.read_text()
    listed = summarize_run(second.run_dir)
    assert (listed.status, listed.steps, listed.attempts, listed.audit_ok) == ("complete", 6, 2, True)
    assert listed.loss == second.losses[-1]
    assert listed.eval_loss == second.result["eval_loss"]
    assert listed.tokens_per_s == pytest.approx(second.result["tokens_per_s"])
    flops = read_plan(second.run_dir / PLAN_FILE).flops_per_token
    assert second.result["flops_per_s"] == pytest.approx(listed.tokens_per_s * flops)
    assert f"{format_rate(second.result['flops_per_s'], 'FLOP')}, MFU" in second.messages


def test_a_failed_run_has_a_report_page_with_the_error(train, tmp_path):
    """The learning rate makes the loss infinite: exit status 4."""
    failed = train("layout.dp_replicate=1", "run_dir=run", "train.lr=1e30", "train.clip=0.0", expect=4)
    assert failed.result["status"] == "error"
    assert [error["code"] for error in failed.result["errors"]] == ["train-not-finite"]
    assert failed.result["run_dir"] == str(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'class="badge bad">failed' in page
    assert "train-not-finite" in page
    assert summarize_run(tmp_path / "run").status == "failed"


def test_a_report_page_that_cannot_be_written_gives_a_warning(train, tmp_path):
    """A folder has the name of the page: the run still completes with exit status 0."""
    train("layout.dp_replicate=1", "run_dir=fresh", "train.steps=2", "checkpoint.every_steps=1")
    (tmp_path / "fresh" / "report.html").unlink()
    (tmp_path / "fresh" / "report.html").mkdir()
    ran = train("layout.dp_replicate=1", "run_dir=fresh", "train.steps=3", resume=True)
    assert ran.result["status"] == "complete"
    assert ran.result["report"] is None
    assert "the report was not written" in ran.messages


def test_bench_scaling_measures_and_audits_each_size_and_writes_only_the_plot(
    job_file, tmp_path, monkeypatch, capfd
):
    """Weak scaling on one and two ranks: a clean audit for each, and measured communication on two."""
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = {p.name for p in tmp_path.iterdir()}
    overrides = ["layout.dp_replicate=2", "layout.bucket_mb=0.1"]
    status = bench_scaling(
        Output(as_json=True), str(job_file), overrides, ranks="2,1", steps=6, weak=True, out=Path("s.svg")
    )
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert status == 0, err
    assert "layout.dp_replicate=2 of the job is replaced" in err
    one, two = result["rows"]
    assert [row["ranks"] for row in result["rows"]] == [1, 2]
    assert [row["global_batch"] for row in result["rows"]] == [12, 24], "weak: the batch grows"
    assert (one["audit_ok"], two["audit_ok"]) == (True, True), err
    assert (one["overlap"], one["communication_s"], one["speedup"]) == (None, 0.0, 1.0)
    assert two["communication_s"] > 0
    assert 0 < two["exposed_s"] <= two["communication_s"] < two["step_s"]
    assert 0 <= two["overlap_low"] <= two["overlap_high"] <= 1
    assert two["tokens_per_s"] == pytest.approx(two["tokens_per_step"] / two["step_s"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    assert {"machine", "date", "basis"} <= set(result)
    assert ET.parse("s.svg").getroot().tag.endswith("svg")
    assert {p.name for p in tmp_path.iterdir()} - before == {"s.svg"}
    assert list(temporary.iterdir()) == []
