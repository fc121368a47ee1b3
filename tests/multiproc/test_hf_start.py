"""Runs that start from the weights of a Hugging Face folder: on one and two ranks, resumed, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.hf.export import export_checkpoint
from meshwright.core.errors import UserError
from meshwright.layout.fsdp_groups import list_groups
from meshwright.layout.stages import list_stages
from meshwright.spec.load import load_job
from saved_checkpoints import load_weights


@pytest.fixture
def folder(train, tmp_path) -> Path:
    """A trained model, exported in the Hugging Face format in several files."""
    trained = train("train.steps=2", "layout.dp_replicate=1")
    out = tmp_path / "folder"
    export_checkpoint(Path(trained.result["checkpoint"]), out, "float32", 100_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


@pytest.fixture
def from_folder(train, folder, use_hf_folder):
    """`train`, starting from that folder."""
    use_hf_folder(folder)
    return train


def test_one_and_two_ranks_start_from_the_weights_of_the_folder(from_folder, folder):
    """Equal losses, and after one step the weights are close to the folder's.

    A resume reads the checkpoint: the weights of the folder are deleted before it.
    """
    common = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    one = from_folder("name=one", "layout.dp_replicate=1", *common)
    two = from_folder("name=two", "layout.dp_replicate=2", *common)
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert f"files of {folder}" in one.messages
    weights = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    first = load_weights(one.run_dir / "checkpoints" / "step-00000001")
    moved = (first["norm.weight"] - weights["model.norm.weight"]).abs().max()
    assert 0 < moved < 0.01, "the run did not start from the folder's weights"
    assert torch.allclose(first["embed.weight"], weights["model.embed_tokens.weight"], atol=0.01)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shutil.rmtree(one.run_dir / "checkpoints" / "step-00000003")
    resumed = from_folder("name=one", "layout.dp_replicate=1", *common, resume=True)
    assert resumed.losses == one.losses


DEEP = "model.num_layers=8"


def test_a_rank_never_holds_the_full_model_during_startup(
    train, job_file, use_hf_folder, tmp_path, monkeypatch
):
    """The peak is the rank's shards, its optimizer state and one full FSDP group.

    It holds for random weights, weights of a folder, and a resume. The model has eight blocks, so its full
    weights exceed that bound.
    """
    common = ("train.steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    sharded = (*common, "layout.dp_shard=2")
    trained = train("train.steps=1", "layout.dp_replicate=1", DEEP)
    folder = tmp_path / "folder"
    export_checkpoint(Path(trained.result["checkpoint"]), folder, "float32", 100_000)
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_startup_memory")
    random = train("name=random", *sharded, "layout.zero=2", DEEP)
    use_hf_folder(folder)
    one = train("name=one", *common, "layout.dp_replicate=1")
    read = train("name=read", *sharded)
    assert read.losses == pytest.approx(one.losses, rel=1e-5)
    assert read.losses[0] < random.losses[0], "the folder's weights are trained"
    shutil.rmtree(read.run_dir / "checkpoints" / "step-00000002")
    startup_peaks = [read_startup_peaks(run) for run in (random, read)]
    resumed = train("name=read", *sharded, resume=True)
    assert resumed.losses == read.losses
    startup_peaks.append(read_startup_peaks(resumed))
    weights = sum(t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values())
    groups = list_groups(list_stages(load_job(str(job_file), []))[0])
    largest = 4 * max(parameter.count for group in groups for parameter in group.parameters)
    full_group = max(group.gathered_bytes(2, "fp32") for group in groups)
    for peaks in startup_peaks:
        for rank, peak in enumerate(peaks):
            shards, state = (read.result["state_bytes"][part][rank] for part in ("parameters", "optimizer"))
            assert shards + state < peak <= shards + state + full_group + 2 * largest
            assert peak < weights + state, "the rank held the full model"


def read_startup_peaks(run):
    """Peak bytes of each rank while it built its trainer."""
    return [json.loads((run.run_dir / f"start-{rank}.json").read_text())["peak"] for rank in range(2)]


def test_a_truncated_weight_file_is_refused_and_a_folder_without_weights_trains_from_scratch(
    from_folder, folder
):
    """The refused run leaves no folder. Training from scratch has the losses of random initial weights."""
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        from_folder("name=bad", "layout.dp_replicate=1")
    assert [p.code for p in caught.value.problems] == ["model-hf-weights-broken"]
    assert not list(Path("runs").glob("bad-*"))
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    fresh = from_folder("name=scratch", "layout.dp_replicate=1", "train.steps=2")
    assert "from scratch" in fresh.messages
    earlier = [json.loads(line) for line in Path("runs/tiny-1/events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in earlier if event["event"] == "step"]
    assert fresh.losses == losses
