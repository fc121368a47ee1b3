"""A run that resumes draws no random weights: for large models that would take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.models.weight_source import RandomWeights
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.prepare import ResumeMode, prepare_run
from meshwright.runs.reporter import SILENT
from meshwright.train.worker import run_rank


def run(job_file: Path, steps: int, name: str, resume: ResumeMode = "no") -> list[dict]:
    """Train in this process; returns the events."""
    overrides = ("layout.dp_replicate=1", f"train.steps={steps}", f"run_dir={job_file.parent / name}")
    prepared = prepare_run(LoadedJob.load(str(job_file), overrides), resume, SILENT)
    events: list[dict] = []
    with prepared.locks:
        assert run_rank(prepared.assignment.run_dir, events.append) == 0
    return events


def test_a_resumed_run_draws_no_weights(job_file, monkeypatch):
    whole = run(job_file, 4, "whole")
    losses = {event["step"]: event["loss"] for event in whole if event["event"] == "step"}
    run(job_file, 2, "parts")

    def refuse(*_: object) -> None:
        pytest.fail("random weights were drawn")

    monkeypatch.setattr(RandomWeights, "rows", refuse)
    resumed = run(job_file, 4, "parts", "must")
    found = {event["step"]: event["loss"] for event in resumed if event["event"] == "step"}
    assert found == {step: losses[step] for step in (3, 4)}
