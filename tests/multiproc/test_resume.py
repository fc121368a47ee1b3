"""Resumed runs: bit-identical in the same layout, equal losses on other ranks, refused where they cannot."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from meshwright import load_run
from meshwright.checkpoint.resume import require_finite
from meshwright.core.errors import UserError
from meshwright.data.prepare import CorpusSpec, prepare_corpus
from meshwright.launch.lock import RunLock
from saved_checkpoints import require_equal_files


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_resumed_run_is_bit_identical(train, tmp_path, ranks):
    """Six steps, against six steps resumed after the third: equal losses, weights and optimizer state."""
    common = [f"layout.dp_replicate={ranks}", "train.steps=6", "layout.bucket_mb=0.05", "train.eval_every=4"]
    common += ["checkpoint.every_steps=3", "checkpoint.keep_last=9"]
    straight = train(*common)
    rescued = tmp_path / "rescued"
    shutil.copytree(_checkpoint(straight.run_dir, 3), rescued / "step-00000003")
    resumed = train(*common, f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == straight.losses[3:]
    assert resumed.result["eval_loss"] == straight.result["eval_loss"]
    require_equal_files(rescued / "step-00000006", _checkpoint(straight.run_dir, 6))


@pytest.mark.slow
def test_a_resume_on_another_number_of_ranks_keeps_losses_and_sample_order(train, tmp_path):
    """Three ranks resume a run of two. The losses are equal up to rounding."""
    common = ["train.steps=8", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    straight = train(*common, "layout.dp_replicate=2")
    rescued = tmp_path / "rescued"
    shutil.copytree(_checkpoint(straight.run_dir, 4), rescued / "step-00000004")
    resumed = train(*common, "layout.dp_replicate=3", f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == pytest.approx(straight.losses[4:], rel=1e-5)


def test_resume_continues_the_newest_run_as_a_new_generation(train, job_file):
    """`--resume` without a folder. Losses and audit cover both attempts, the first with its own plan.

    Then it is refused: the run is complete, the model differs, or there is no checkpoint.
    """
    from meshwright.cli.output import Output
    from meshwright.cli.train import run_training

    first = train("train.steps=4", "layout.dp_replicate=2")
    second = train("train.steps=6", "layout.dp_replicate=1", resume=True)
    assert second.run_dir == first.run_dir
    assert second.losses[:4] == first.losses
    assert len(second.losses) == 6
    run = load_run(second.run_dir)
    assert run.losses == second.losses
    assert (run.audit().generations, run.audit().coverage) == (2, ())
    counted = {(row.axis, row.phase): row.calls for row in run.audit().collectives}
    assert counted["control", "step"] == 4, "the collectives of the first attempt, which had two ranks"
    events = (first.run_dir / "events.jsonl").read_text()
    assert '"generation":0' in events
    assert '"generation":1' in events
    for overrides, code in (
        (["train.steps=6"], "resume-complete"),
        (["train.steps=8", "model.ffn_size=192"], "resume-mismatch"),
        (["train.steps=8", "checkpoint.dir=elsewhere"], "resume-nothing"),
    ):
        with pytest.raises(UserError) as caught:
            run_training(Output(as_json=True), str(job_file), overrides, resume=True)
        assert caught.value.problems[0].code == code


def test_a_damaged_checkpoint_is_skipped(train):
    """One byte of the newest checkpoint is flipped: a warning names it, and the previous one is used."""
    first = train("train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    newest = _checkpoint(first.run_dir, 6) / "rank-00000.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    resumed = train("train.steps=6", resume=True)
    assert resumed.losses == first.losses
    assert load_run(resumed.run_dir).record.steps.replayed == 2
    assert "skipped: " in resumed.messages
    assert "step-00000006 is damaged" in resumed.messages


def test_checkpoint_rotation_keeps_the_last_two_and_the_best(train):
    trained = train(
        "train.steps=6",
        "checkpoint.every_steps=1",
        "checkpoint.keep_last=2",
        "train.eval_every=1",
        "checkpoint.on_best=true",
    )
    kept = sorted(p.name for p in (trained.run_dir / "checkpoints").iterdir() if p.is_dir())
    assert kept[-2:] == ["step-00000005", "step-00000006"]
    best = (trained.run_dir / "checkpoints" / "best").read_text().strip()
    assert best in kept


def test_a_checkpoint_folder_of_another_run_is_refused(train, job_file, tmp_path):
    from meshwright.cli.output import Output
    from meshwright.cli.train import run_training

    train("train.steps=2", f"checkpoint.dir={tmp_path / 'shared'}")
    before = sorted(tmp_path.glob("runs/*"))
    with pytest.raises(UserError) as caught:
        run_training(Output(as_json=True), str(job_file), [f"checkpoint.dir={tmp_path / 'shared'}"], False)
    assert caught.value.problems[0].code == "checkpoint-dir-used"
    assert sorted(tmp_path.glob("runs/*")) == before, "the refused run left a folder"
    given = [f"checkpoint.dir={tmp_path / 'shared'}", "run_dir=another", "train.steps=4"]
    with RunLock.take_checkpoints(tmp_path / "shared"), pytest.raises(UserError) as caught:
        run_training(Output(as_json=True), str(job_file), given, True)
    assert caught.value.problems[0].code == "checkpoint-dir-busy"
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
    assert not Path("another").exists(), "the refused run left a folder"


def test_a_checkpoint_tensor_that_is_not_finite_is_refused_by_name(tmp_path):
    """Weights, moments and step counts are read by this function; checksums of such a file may be right."""
    file = tmp_path / "step-00000001"
    require_finite(str(file), "head.weight:exp_avg", torch.ones(2))
    require_finite(str(file), "head.weight:step", torch.ones((), dtype=torch.int64))
    with pytest.raises(UserError) as caught:
        require_finite(str(file), "head.weight:exp_avg", torch.tensor([1.0, float("inf")]))
    (problem,) = caught.value.problems
    assert problem.code == "checkpoint-not-finite"
    assert "head.weight:exp_avg" in problem.rule


def test_data_may_grow_at_the_end_and_change_in_no_other_way(train, tmp_path):
    """New shards reorder nothing: the losses go on bit by bit. A changed document is refused."""
    source, out = tmp_path / "text", tmp_path / "grown"
    source.mkdir()

    def prepare(documents: int, first: str = "document") -> None:
        for number in range(documents):
            text = first if number == 1 else "document"
            (source / f"{number:03d}.txt").write_text(f"{text} {number} has some words. " * 20)
        spec = CorpusSpec(sources=(str(source),), out=str(out), eval_fraction=0.2, shard_tokens=1)
        prepare_corpus(spec, Path())

    common = (f"data.path={out}", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "train.steps=6")
    prepare(40)
    straight = train(*common, "run_dir=straight")
    shutil.copytree(_checkpoint(straight.run_dir, 3), tmp_path / "rescued" / "step-00000003")
    prepare(60)
    resumed = train(*common, "checkpoint.dir=rescued", "run_dir=resumed", resume=True)
    assert resumed.losses == straight.losses[3:]
    assert "the new ones follow at the end of epoch 1" in resumed.messages
    prepare(60, first="another")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        train(*common, "checkpoint.dir=rescued", "run_dir=refused", "train.steps=9", resume=True)
    assert [problem.code for problem in caught.value.problems] == ["resume-data-changed"]
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
