"""A ResNet on real ranks: equal losses with GroupNorm, audited BatchNorm, bit-identical resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import meshwright as mw
from meshwright.core.errors import UserError
from meshwright.data.images import select_held_out
from saved_checkpoints import load_weights, require_equal_files

IMAGES = """
name = "images"
[model]
preset = "resnet-tiny"
image_size = 16
[data]
path = "builtin:synthetic-images"
[train]
steps = 6
global_batch = 10
lr = 3e-3
warmup = 2
eval_samples = 16
[cluster]
device = "cpu"
devices_per_node = 2
matmul_flops_per_s = 1e11
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "images.toml"
    path.write_text(IMAGES)
    return path


def test_one_to_three_ranks_have_equal_losses_and_a_clean_audit(train):
    """Three ranks pad the batch of 10 and the evaluation with zero-weight images.

    Three ranks also use full activation checkpointing.
    """
    alone = train("layout.dp_replicate=1", "layout.micro_batch=10")
    assert alone.losses[-1] != alone.losses[0]
    for layout in (
        ["layout.dp_replicate=2", "layout.micro_batch=2"],
        ["layout.dp_replicate=3", "layout.recompute=full"],
    ):
        spread = train(*layout)
        assert spread.result["audit_ok"]
        assert spread.losses == pytest.approx(alone.losses, rel=1e-5), layout
        assert spread.result["eval_loss"] == pytest.approx(alone.result["eval_loss"], rel=1e-5)
    assert "img/s" in spread.messages
    assert "tok/s" not in spread.messages


@pytest.mark.parametrize("norm", [pytest.param("group", marks=pytest.mark.slow), "batch"])
def test_a_resumed_run_is_bit_identical(train, tmp_path, norm):
    """The checkpoint holds BatchNorm's running statistics. A job with BatchNorm gets a note."""
    common = ["layout.dp_replicate=2", f"model.norm={norm}", "checkpoint.every_steps=3", "train.eval_every=3"]
    straight = train(*common)
    assert straight.result["audit_ok"]
    assert ("model.norm=batch" in straight.messages) == (norm == "batch")
    rescued = tmp_path / "rescued"
    shutil.copytree(straight.run_dir / "checkpoints" / "step-00000003", rescued / "step-00000003")
    resumed = train(*common, f"checkpoint.dir={rescued}", resume=True)
    assert resumed.losses == straight.losses[3:]
    assert resumed.result["eval_loss"] == straight.result["eval_loss"]
    require_equal_files(rescued / "step-00000006", straight.run_dir / "checkpoints" / "step-00000006")
    saved = load_weights(rescued / "step-00000006")
    statistics = [name for name in saved if name.endswith("running_var")]
    assert bool(statistics) == (norm == "batch")
    for name in statistics:
        assert not bool((saved[name] == 1).all()), f"{name} has its initial value"


def test_a_folder_of_images_trains_in_bf16_and_is_evaluated(train, tmp_path):
    """The images are uint8 in channels-last order. `generate` refuses the model."""
    from meshwright.cli.generate import write_text
    from meshwright.cli.output import Output

    folder = tmp_path / "photos"
    folder.mkdir()
    draw = np.random.default_rng(0)
    np.save(folder / "images.npy", draw.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", draw.integers(0, 10, 40))
    trained = train(f"data.path={folder}", "data.eval_fraction=0.2", "train.precision=bf16", "train.steps=3")
    assert trained.result["audit_ok"]
    manifest = json.loads((Path(trained.result["checkpoint"]) / "manifest.json").read_text())
    assert manifest["model"]["architecture"] == "resnet"
    (own,) = mw.evaluate(trained.run_dir, folder, precision="bf16")
    assert own.samples == int(select_held_out(40, 0.2).sum()), "those that the training held out"
    assert own.loss == pytest.approx(trained.result["eval_loss"], rel=1e-2)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("images.npy", "labels.npy"):
        shutil.copy(folder / name, other / f"eval_{name}")
    (whole,) = mw.evaluate(trained.run_dir, other)
    assert whole.samples == 40, "a folder for evaluation only"
    settings = {"prompt": "a", "tokens": 1, "template": None, "tp": 1}
    with pytest.raises(UserError) as caught:
        write_text(Output(as_json=True), trained.run_dir, settings)
    assert caught.value.problems[0].code == "generate-not-text"
