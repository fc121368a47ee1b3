"""A run that follows a corpus that grows: resumes, kills and other world sizes read the same samples."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import read_manifest
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.runs.faults.checks.running_command import commands

JOB = """
[model]
preset = "tiny"
[data]
path = "prepared"
seq_len = 16
follow = true
[train]
steps = 120
global_batch = 6
lr = 3e-4
eval_samples = 8
[checkpoint]
every_steps = 10
keep_last = 20
[cluster]
device = "cpu"
devices_per_node = 4
matmul_flops_per_s = 1e11
"""
GROWS_AFTER = 20
"""Steps."""


def prepare(folder: Path, documents: int) -> None:
    """Prepare the first documents; the last shard of fewer is the beginning of that of more."""
    source = folder / f"text-{documents}"
    source.mkdir()
    for number in range(documents):
        (source / f"{number:03d}.txt").write_text(f"text {number:03d} of many words " * 8)
    spec = CorpusSpec(
        sources=(str(source),), out=str(folder / "prepared"), eval_fraction=0.3, shard_tokens=1500
    )
    prepare_corpus(spec, Path())


def run(folder: Path, run_dir: str, *settings: str, grows: bool = False, kills: bool = False) -> list[float]:
    """Train; the losses by step of the last attempt."""
    with commands(folder) as start:
        running = start("train", folder / "job.toml", f"run_dir={run_dir}", *settings)
        path = folder / run_dir
        if grows:
            running.wait_for(path, lambda e: e["event"] == "step" and e["step"] == GROWS_AFTER)
            prepare(folder, 30)
        if kills:
            victim = running.wait_for(path, lambda e: e["event"] == "started" and e["rank"] == 1)["pid"]
            running.wait_for(path, lambda e: e["event"] == "step" and e["step"] == 95)
            os.kill(victim, signal.SIGKILL)
        status, out, err = running.finish(240)
        assert status == 0, out + err
        events = running.events(path)
    assert grows == any(event["event"] == "data_grew" for event in events)
    assert kills == any(event["event"] == "recovered" for event in events)
    found = {e["step"]: e["loss"] for e in events if e["event"] == "step" and e["rank"] == 0}
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_position_survives_restarts_and_other_world_sizes(tmp_path):
    """The corpus grows while 2 ranks train. 1 and 3 ranks go on from a checkpoint; one of 3 is killed."""
    prepare(tmp_path, 14)
    (tmp_path / "job.toml").write_text(JOB)
    straight = run(tmp_path, "two", "layout.dp_replicate=2", grows=True)
    assert len(straight) == 120
    saved = tmp_path / "two/checkpoints/step-00000080"
    manifest = read_manifest(saved)
    (table,) = manifest.epochs.values()
    first, *_, last = table
    assert (first.epoch, first.begin) == (0, 0)
    assert last.epoch > 0, "it grew in a later epoch"
    assert first.samples < last.samples
    assert first.index_sha256 != last.index_sha256
    assert last.samples == manifest.data[""].samples
    for ranks, kills in ((1, False), (3, True)):
        name = f"resumed-{ranks}"
        shutil.copytree(saved, tmp_path / f"{name}/checkpoints/step-00000080")
        settings = [f"layout.dp_replicate={ranks}", f"checkpoint.dir={tmp_path / name / 'checkpoints'}"]
        losses = run(tmp_path, f"{name}-run", *settings, "--resume", kills=kills)
        assert losses == pytest.approx(straight[80:], rel=1e-5)
    end = json.loads((tmp_path / "two/checkpoints/step-00000120/manifest.json").read_text())
    assert end["position"] == 720
    assert end["position"] > last.begin + last.samples, "another epoch has begun"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_changed_data_end_the_run_with_a_checkpoint_to_resume_from(tmp_path):
    prepare(tmp_path, 14)
    good = tmp_path / "good"
    shutil.copytree(tmp_path / "prepared", good)
    (tmp_path / "job.toml").write_text(JOB.replace("every_steps = 10", "every_steps = 0"))
    with commands(tmp_path) as start:
        running = start("train", tmp_path / "job.toml", "run_dir=run", "layout.dp_replicate=2")
        running.wait_for(tmp_path / "run", lambda e: e["event"] == "step" and e["step"] == GROWS_AFTER)
        prepare(tmp_path, 9)
        status, out, err = running.finish(120)
    assert status == 4, out + err
    assert "data-follow-changed" in err
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    assert read_manifest(saved).step > GROWS_AFTER
    shutil.rmtree(tmp_path / "prepared")
    good.rename(tmp_path / "prepared")
    assert len(run(tmp_path, "run", "layout.dp_replicate=2", "--resume")) == 120
