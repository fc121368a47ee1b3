"""Real runs that start from a Hugging Face folder: one rank, two ranks, resumed, refused."""

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


@pytest.fixture
def folder(train, tmp_path) -> Path:
    """A model that was trained here and exported, in shards."""
    trained = train("train.steps=2", "layout.dp_replicate=1")
    out = tmp_path / "folder"
    export_checkpoint(Path(trained.result["checkpoint"]), out, "float32", 100_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


@pytest.fixture
def from_folder(train, folder, job_file):
    """Train from that folder."""
    job_file.write_text(job_file.read_text().replace('preset = "tiny"', f'hf = "{folder}"'))
    return train


def test_two_ranks_start_from_the_same_weights_as_one(from_folder, folder):
    """Equal losses, and not those of a fresh model: every rank has read the files. Then it is resumed."""
    common = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    one = from_folder("name=one", "layout.dp_replicate=1", *common)
    two = from_folder("name=two", "layout.dp_replicate=2", *common)
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert f"files of {folder}" in one.messages
    weights = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    first = load_file(one.run_dir / "checkpoints" / "step-00000001" / "model.safetensors")
    moved = (first["norm.weight"] - weights["model.norm.weight"]).abs().max()
    assert 0 < moved < 0.01, "one step away from the folder's weights"
    assert torch.allclose(first["embed.weight"], weights["model.embed_tokens.weight"], atol=0.01)
    # A checkpoint wins over the folder, whose weights may be gone by then.
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    shutil.rmtree(one.run_dir / "checkpoints" / "step-00000003")
    resumed = from_folder("name=one", "layout.dp_replicate=1", *common, resume=True)
    assert resumed.losses == one.losses[2:]


DEEP = "model.num_layers=8"


def test_a_rank_never_holds_the_whole_model(train, job_file, tmp_path, monkeypatch):
    """Drawn, from a folder and resumed: a rank holds its shards and one whole group, and starts the same.

    The model has eight blocks: whole, its weights alone are more than what a rank may hold.
    """
    common = ("train.steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    cut = (*common, "layout.dp_shard=2")
    trained = train("train.steps=1", "layout.dp_replicate=1", DEEP)
    folder = tmp_path / "folder"
    export_checkpoint(Path(trained.result["checkpoint"]), folder, "float32", 100_000)
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_startup_memory")
    drawn = train("name=drawn", *cut, "layout.zero=2", DEEP)
    job_file.write_text(job_file.read_text().replace('preset = "tiny"', f'hf = "{folder}"'))
    one = train("name=one", *common, "layout.dp_replicate=1")
    read = train("name=read", *cut)
    assert read.losses == pytest.approx(one.losses, rel=1e-5)
    assert read.losses[0] < drawn.losses[0], "the folder's weights have learnt something"
    shutil.rmtree(read.run_dir / "checkpoints" / "step-00000002")
    notes = {run.run_dir: held_at_start(run) for run in (drawn, read)}
    resumed = train("name=read", *cut, resume=True)
    assert resumed.losses == read.losses[1:]
    notes["resumed"] = held_at_start(resumed)
    weights = sum(t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values())
    groups = list_groups(list_stages(load_job(str(job_file), []))[0])
    largest = 4 * max(parameter.count for group in groups for parameter in group.parameters)
    whole_group = max(group.gathered_bytes(2, "fp32") for group in groups)
    for peaks in notes.values():
        for rank, peak in enumerate(peaks):
            shards, state = (read.result["state_bytes"][part][rank] for part in ("parameters", "optimizer"))
            assert shards + state < peak <= shards + state + whole_group + 2 * largest
            assert peak < weights + state, "what a whole model would take"


def held_at_start(run):
    """Most bytes of each rank while it built its session."""
    return [json.loads((run.run_dir / f"start-{rank}.json").read_text())["peak"] for rank in range(2)]


def test_a_folder_without_weights_starts_from_scratch_and_a_broken_one_is_refused(from_folder, folder):
    """The same losses as a fresh model of that shape; before that, a cut shard leaves no run behind."""
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
