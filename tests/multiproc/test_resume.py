"""A resumed run goes on as if it had never stopped: to the last bit, with four ranks too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshwright.core.errors import UserError


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize("ranks", [1, 4])
def test_resumed_run_is_bit_identical(train, tmp_path, ranks):
    """Ten steps at once, and ten with a stop after the fourth: equal losses, equal bytes of weights."""
    common = [f"layout.dp_replicate={ranks}", "train.steps=10", "layout.bucket_mb=0.05", "train.eval_every=5"]
    common += ["checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    straight = train(*common)
    rescued = tmp_path / "rescued"
    shutil.copytree(_checkpoint(straight.run_dir, 4), rescued / "step-00000004")
    resumed = train(*common, f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == straight.losses[4:]
    assert resumed.result["eval_loss"] == straight.result["eval_loss"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours = (rescued / "step-00000010" / name).read_bytes()
        assert ours == (_checkpoint(straight.run_dir, 10) / name).read_bytes(), name


def test_resume_on_another_number_of_ranks_keeps_curve_and_order(train, tmp_path):
    """Three ranks go on where two stopped, with the same samples: equal up to rounding."""
    common = ["train.steps=8", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    straight = train(*common, "layout.dp_replicate=2")
    rescued = tmp_path / "rescued"
    shutil.copytree(_checkpoint(straight.run_dir, 4), rescued / "step-00000004")
    resumed = train(*common, "layout.dp_replicate=3", f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == pytest.approx(straight.losses[4:], rel=1e-5)


def test_resume_in_place_adds_a_generation(train):
    """--resume without a folder goes on with the newest run; its audit counts the new attempt alone."""
    first = train("train.steps=4")
    second = train("train.steps=6", resume=True)
    assert second.run_dir == first.run_dir
    assert len(second.losses) == 2
    events = (first.run_dir / "events.jsonl").read_text()
    assert '"generation":0' in events
    assert '"generation":1' in events


def test_a_damaged_checkpoint_is_skipped(train):
    """One flipped byte in the newest: it is named, and the one before is used."""
    first = train("train.steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9")
    newest = _checkpoint(first.run_dir, 6) / "model.safetensors"
    damaged = bytearray(newest.read_bytes())
    damaged[-1] ^= 1
    newest.write_bytes(damaged)
    resumed = train("train.steps=6", resume=True)
    assert resumed.losses == first.losses[4:]
    assert "skipped: " in resumed.messages
    assert "step-00000006 is damaged" in resumed.messages


def test_rotation_keeps_the_last_and_the_best(train):
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


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["train.steps=4"], "resume-complete"),
        (["train.steps=6", "model.ffn_size=192"], "resume-mismatch"),
        (["train.steps=6", "checkpoint.dir=elsewhere"], "resume-nothing"),
    ],
)
def test_what_cannot_be_resumed_is_refused(train, job_file, overrides, code):
    from meshwright.cli.output import Output
    from meshwright.cli.train import run_training

    train("train.steps=4")
    with pytest.raises(UserError) as caught:
        run_training(Output(as_json=True), str(job_file), overrides, resume=True)
    assert caught.value.problems[0].code == code


def test_a_checkpoint_folder_of_another_run_is_not_mixed_up(train, job_file, tmp_path):
    from meshwright.cli.output import Output
    from meshwright.cli.train import run_training

    train("train.steps=2", f"checkpoint.dir={tmp_path / 'shared'}")
    before = sorted(tmp_path.glob("runs/*"))
    with pytest.raises(UserError) as caught:
        run_training(Output(as_json=True), str(job_file), [f"checkpoint.dir={tmp_path / 'shared'}"], False)
    assert caught.value.problems[0].code == "checkpoint-dir-used"
    assert sorted(tmp_path.glob("runs/*")) == before, "a refused run leaves no folder"
