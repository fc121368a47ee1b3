"""The Python API with real ranks: in this process, in a script, from standard input and under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw

SCRIPT = """
import json, sys
import meshwright as mw

run = mw.load_job(sys.argv[1], "layout.dp_replicate=2", "train.steps=3").train()
print(json.dumps({"losses": run.losses, "ok": run.audit().ok, "rank": run.rank}))
"""


@pytest.fixture
def job(job_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return mw.load_job(job_file, "layout.dp_replicate=2", "train.steps=3")


def test_train_returns_a_run_and_prints_nothing(job, capfd):
    """The run has losses, audit and report; the event listener gets its events; `load_run` reads it again."""
    events: list[str] = []
    run = job.train(reporter=mw.Reporter(on_event=lambda event: events.append(event["event"])))
    assert (run.status, len(run.losses)) == ("complete", 3)
    assert run.audit().ok
    assert run.tokens_per_s > 0
    assert run.page is not None
    assert "step" in events
    assert capfd.readouterr().out == ""
    again = mw.load_run(run.run_dir)
    assert again.losses == run.losses
    assert again.report().status == "complete"
    assert mw.list_runs()[0].loss == run.losses[-1]
    assert len(mw.generate(run.run_dir, "the ", tokens=5)) > 0


def test_prove_and_dry_run_pass_for_a_correct_job(job):
    assert job.prove().equal
    assert job.dry_run(rank=1).ok


def test_a_failed_run_raises_an_error_with_the_run_folder(job, monkeypatch):
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:exception_in_step_3")
    with pytest.raises(mw.RunFailedError) as caught:
        job.train()
    assert mw.load_run(caught.value.run_dir).status == "failed"


def run(*command: object, cwd: Path, text: str | None = None) -> list[dict]:
    done = subprocess.run(
        list(map(str, command)), input=text, cwd=cwd, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_script_without_main_guard_trains_from_a_file_and_from_standard_input(job_file, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (first,) = run(sys.executable, script, job_file, cwd=tmp_path)
    assert first["ok"]
    assert len(first["losses"]) == 3
    (second,) = run(sys.executable, "-", job_file, cwd=tmp_path, text=SCRIPT)
    assert second["losses"] == first["losses"]


@pytest.mark.slow
def test_the_script_trains_under_torchrun(job_file, tmp_path):
    """Both ranks have the same losses and a clean audit."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = run(*start, script, job_file, cwd=tmp_path)
    assert sorted(one["rank"] for one in found) == [0, 1]
    assert found[0]["losses"] == found[1]["losses"]
    assert all(one["ok"] for one in found)
    logs = [path.read_text() for path in tmp_path.rglob("events*.jsonl")]
    assert any('"transport_fallback"' in log for log in logs), "torchrun's ranks have no shared memory"


@pytest.mark.slow
def test_the_examples_of_the_api_page_run(tmp_path, monkeypatch):
    """All Python blocks of ``docs/api.md`` run in order in one interpreter."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    Path("job.toml").write_text(next(text for language, text in blocks if language == "toml"))
    snippets = [text for language, text in blocks if language == "python"]
    assert len(snippets) > 4
    Path("page.py").write_text("\n".join(snippets))
    done = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout, "the reporter did not log steps"
