"""Pipeline parallelism through the command: train, evaluate, save, resume, custom schedules and stages.

All runs have the same model and batch, so that one reference run serves all.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reference_runs import max_relative_diff

from meshwright.checkpoint.hf.export import export_checkpoint
from meshwright.cli.generate import write_text
from meshwright.cli.output import Output
from meshwright.cli.train import run_training
from meshwright.core.errors import MeshwrightError
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.layout.pipeline_schedules import schedule_of
from meshwright.layout.stages import local_stages
from meshwright.plan.contract import PLAN_FILE, read_plan

COMMON = (
    *("model.num_layers=4", "train.global_batch=4", "train.steps=6", "train.eval_samples=5"),
    *("checkpoint.every_steps=3", "checkpoint.keep_last=9", "layout.micro_batch=1"),
)
THREE_STAGES = """
0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3
1F0,2F0,2B0,1F1,1B0,2F1,2B1,1F2,1B1,2F2,2B2,1F3,1B2,2F3,2B3,1B3   # the second rank has two stages
"""
DEADLOCK = """
0F0,0B0,0F1,0B1
1F0,1F1,1B1,1B0
"""


@dataclass(frozen=True)
class Run:
    """A finished run with its events."""

    run_dir: Path
    result: dict[str, Any]

    def of(self, event: str, rank: int) -> list[dict[str, Any]]:
        """Events of one kind of one rank."""
        return [e for e in read_events(self.run_dir / EVENTS_FILE).of(event) if e["rank"] == rank]


@pytest.fixture(scope="module")
def straight(job_text, tmp_path_factory):
    """Six steps of one process, and of a pipeline of two ranks."""
    folder = tmp_path_factory.mktemp("pipeline")
    job_file = folder / "job.toml"
    job_file.write_text(job_text)

    def run(layout: str) -> Run:
        overrides = [*COMMON, f"layout.{layout}", f"run_dir={folder / layout}"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run_training(Output(as_json=True), str(job_file), overrides, False) == 0
        return Run(folder / layout, json.loads(out.getvalue()))

    return run("dp_replicate=1"), run("pp=2")


def test_a_pipeline_has_the_training_and_eval_losses_of_one_process(straight):
    """Equal losses, reported by every rank; the audit passes."""
    one, two = straight
    assert max_relative_diff(two.result["losses"], one.result["losses"]) < 1e-5
    assert two.result["eval_loss"] == pytest.approx(one.result["eval_loss"], rel=1e-5)
    assert two.result["audit_ok"], two.result["differences"]
    assert {row["axis"] for row in two.result["collectives"]} >= {"pp", "pp_tied", "control"}
    for rank in (0, 1):
        assert [event["loss"] for event in two.of("step", rank)] == two.result["losses"]
        assert [event["loss"] for event in two.of("eval", rank)] == [two.result["eval_loss"]]
    norms = [[event["grad_norm"] for event in run.of("step", 0)] for run in straight]
    assert max_relative_diff(norms[1], norms[0]) < 1e-5


def test_the_recorded_timeline_equals_the_schedule(straight):
    """Each rank records start and end of every action of its row, once and in order."""
    run = straight[1]
    job = read_plan(run.run_dir / PLAN_FILE).job
    for rank, row in enumerate(schedule_of(job, micro_batches=4).ranks):
        (timeline,) = run.of("timeline", rank)
        assert timeline["pp_rank"] == rank
        assert [(kind, stage, m) for kind, stage, m, *_ in timeline["actions"]] == [
            (str(a.kind), a.stage, a.micro_batch) for a in row
        ]
        times = [moment for action in timeline["actions"] for moment in action[3:]]
        assert times == sorted(times)
        uncounted = 3  # the first step, the audited one, and the one after a checkpoint
        assert timeline["steps"] == 6 - uncounted


@pytest.fixture
def resume(straight, train, tmp_path):
    """Resume a run from its checkpoint of step 3."""

    def again(source: Run, *layout: str):
        folder = tmp_path / "resumed"
        shutil.copytree(source.run_dir / "checkpoints" / "step-00000003", folder / "step-00000003")
        return train(*COMMON, *layout, f"checkpoint.dir={folder}", resume=True)

    return again


ONE = ("layout.dp_replicate=1",)
UNEVEN = ("layout.pp=2", "layout.schedule=gpipe", "layout.stage_layers=[3, 1]")
SHARDED = ("layout.pp=2", "layout.schedule=zb-h1", "layout.dp_shard=2", "layout.zero=3")


@pytest.mark.parametrize(
    ("source", "layout"), [(0, UNEVEN), pytest.param(1, ONE, marks=pytest.mark.slow), (1, SHARDED)]
)
def test_a_checkpoint_resumes_with_and_without_a_pipeline(straight, resume, source, layout):
    """From one process and back, with other stages, another schedule and FSDP: equal losses."""
    resumed = resume(straight[source], *layout)
    assert max_relative_diff(resumed.losses, straight[source].result["losses"][3:]) < 1e-5
    assert resumed.result["eval_loss"] == pytest.approx(straight[0].result["eval_loss"], rel=1e-5)
    assert "the sharding was" in resumed.messages
    if layout == UNEVEN:
        job = read_plan(resumed.run_dir / PLAN_FILE).job
        assert [len(part.layers) for pp_rank in (0, 1) for part in local_stages(job, pp_rank)] == [3, 1]


def test_a_pipeline_checkpoint_generates_and_exports(straight, train, use_hf_folder, tmp_path, capfd):
    """The checkpoint has the full model: it generates text, and a pipeline starts from its export."""
    run = straight[1]
    settings = {"prompt": "the ", "tokens": 8, "temperature": 0.0, "template": None, "seed": 0, "tp": 1}
    texts = []
    for made in straight:
        assert write_text(Output(as_json=True), made.run_dir, settings) == 0
        texts.append(json.loads(capfd.readouterr().out)["text"])
    assert texts[0] == texts[1] != ""
    folder = tmp_path / "folder"
    export_checkpoint(run.run_dir / "checkpoints" / "step-00000006", folder, "float32", 100_000)
    use_hf_folder(folder)
    still = ("train.steps=1", "train.lr=1e-12", "layout.pp=2", "layout.schedule=interleaved")
    started = train(*COMMON[1:], *still, "layout.virtual_stages=2")
    assert started.result["eval_loss"] == pytest.approx(run.result["eval_loss"], rel=1e-5)


def test_fewer_micro_batches_than_stages_have_the_losses_of_one_process(straight, train):
    """Four stages, two micro-batches."""
    trained = train(*COMMON, "layout.pp=4", "layout.micro_batch=2", "train.steps=2")
    assert max_relative_diff(trained.losses, straight[0].result["losses"][:2]) < 1e-5


def refuse(job_file, *overrides):
    """The error with which `train` refuses a job. Nothing was started or written."""
    with pytest.raises(MeshwrightError) as caught:
        run_training(Output(as_json=True), str(job_file), [*COMMON, *overrides], False)
    assert not list(Path().glob("runs/*"))
    return caught.value


@pytest.mark.parametrize(
    ("layout", "code", "number"),
    [
        ("layout.pp=2 layout.schedule=dualpipe-v layout.micro_batch=2", "layout-dualpipe", 8),
        ("layout.pp=2 layout.schedule=interleaved layout.virtual_stages=2", "layout-interleaved", 6),
    ],
)
def test_too_few_micro_batches_are_refused_with_the_number_to_use(
    job_file, tmp_path, monkeypatch, layout, code, number
):
    monkeypatch.chdir(tmp_path)
    batch = "train.global_batch=5"
    (problem,) = refuse(job_file, batch, *layout.split()).problems
    assert problem.code == code
    assert f"train.global_batch={number}" in (problem.fix or "")


def test_a_custom_schedule_runs_in_its_order(straight, train, tmp_path):
    """Three uneven stages on two ranks: equal losses; the timeline events have the order of the file."""
    file = tmp_path / "three.csv"
    file.write_text(THREE_STAGES)
    own = ("layout.pp=2", f"layout.schedule_file={file}")
    trained = train(*COMMON, *own, "layout.stage_layers=[1, 2, 1]", "train.steps=3")
    assert max_relative_diff(trained.losses, straight[0].result["losses"][:3]) < 1e-5
    events = read_events(trained.run_dir / EVENTS_FILE).of("timeline")
    written = {e["rank"]: ",".join(f"{s}{kind}{m}" for kind, s, m, *_ in e["actions"]) for e in events}
    rows = [line.partition("#")[0].strip() for line in THREE_STAGES.strip().splitlines()]
    assert [written[rank] for rank in (0, 1)] == rows


def test_a_schedule_with_a_deadlock_is_refused(job_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deadlock.csv").write_text(DEADLOCK)
    two = ("train.global_batch=2", "layout.pp=2", "layout.schedule_file=deadlock.csv")
    refused = refuse(job_file, *two)
    assert {problem.code for problem in refused.problems} == {"schedule-not-proved"}
    assert "deadlock.csv:2" in str(refused), "the error names file and line"
