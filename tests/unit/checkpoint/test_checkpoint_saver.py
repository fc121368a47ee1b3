"""A checkpoint is written tensor by tensor in the safetensors format, with one tensor in memory at a time."""

from __future__ import annotations

import resource
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.manifest import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    Manifest,
    list_checkpoints,
    list_leftovers,
    read_manifest,
)
from meshwright.checkpoint.saver import save_checkpoint
from meshwright.checkpoint.tensors import CheckpointTensors, SavedTensor

MODEL = {
    "blocks.10.weight": torch.arange(6.0).reshape(2, 3),
    "blocks.9.weight": torch.arange(8.0).reshape(4, 2).T,  # not contiguous
    "count": torch.tensor(7),
    "none": torch.zeros(0, 5),
    "low": torch.ones(3, dtype=torch.bfloat16),
}
STATE = {"blocks.9.weight:exp_avg": torch.full((2, 4), 0.5), "blocks.9.weight:step": torch.tensor(3.0)}


def manifest(step: int = 1) -> Manifest:
    return Manifest(
        step=step, position=0, world_size=1, model={}, train={}, seq_len=8, data_sha256="", buckets=[]
    )


def tensors_of(model, state=STATE) -> CheckpointTensors:
    files = {MODEL_FILE: model, OPTIMIZER_FILE: state}
    return CheckpointTensors(
        {file: {n: SavedTensor.of(t) for n, t in tensors.items()} for file, tensors in files.items()}
    )


def test_written_files_equal_those_of_safetensors_and_match_their_checksums(tmp_path: Path):
    """Two dtypes, a scalar, an empty tensor, one that is not contiguous, and names that sort as text."""
    done = save_checkpoint(tmp_path / "c", manifest(), tensors_of(MODEL), {"tokenizer.json": b"{}"})
    assert set(read_manifest(done, verify=True).files) == {MODEL_FILE, OPTIMIZER_FILE, "tokenizer.json"}
    for file, tensors in ((MODEL_FILE, MODEL), (OPTIMIZER_FILE, STATE)):
        save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / file)
        assert (done / file).read_bytes() == (tmp_path / file).read_bytes()
        loaded = load_file(done / file)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path):
    """Each tensor is freed before the next one is gathered, also on ranks that write nothing."""
    made: list[weakref.ref[torch.Tensor]] = []

    def make() -> torch.Tensor:
        assert not any(ref() is not None for ref in made), "an earlier tensor is still held"
        tensor = torch.zeros(100)
        made.append(weakref.ref(tensor))
        return tensor

    def build_tensors() -> CheckpointTensors:
        files = {
            file: {f"{n}": SavedTensor(torch.float32, (100,), make) for n in range(4)} for file in ("a", "b")
        }
        return CheckpointTensors(files)

    save_checkpoint(tmp_path, manifest(), build_tensors())
    assert len(made) == 8
    build_tensors().drain()
    assert len(made) == 16


def test_a_failed_write_leaves_no_files_and_the_rest_can_still_be_gathered(tmp_path: Path):
    """A file size limit refuses the third tensor.

    The partial checkpoint is removed, the old one stays, and each tensor is gathered once.
    """
    gathered: list[str] = []

    def saved_tensor(name: str) -> SavedTensor:
        return SavedTensor(torch.float32, (1000,), lambda: (gathered.append(name), torch.zeros(1000))[1])

    names = [f"{n}" for n in range(5)]
    tensors = CheckpointTensors(
        {MODEL_FILE: {n: saved_tensor(n) for n in names}, OPTIMIZER_FILE: {"s": saved_tensor("s")}}
    )
    save_checkpoint(tmp_path, manifest(1), tensors_of(MODEL))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match="large"):
            save_checkpoint(tmp_path, manifest(2), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < len(gathered) < 6
    tensors.drain()
    assert gathered == [*names, "s"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert not list_leftovers(tmp_path)


def test_a_tensor_that_differs_from_its_header_is_not_written(tmp_path: Path):
    wrong = SavedTensor(torch.float32, (2, 3), lambda: torch.zeros(3, 2))
    with pytest.raises(AssertionError, match="its header says"):
        save_checkpoint(tmp_path, manifest(), CheckpointTensors({MODEL_FILE: {"w": wrong}}))
    assert not list_checkpoints(tmp_path)
    assert not list_leftovers(tmp_path)
