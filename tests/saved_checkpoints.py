"""The tensors of checkpoints, for tests that compare them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.tensor_files import CheckpointReader


def load_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All full tensors of a checkpoint, by name: parameters, optimizer state, buffers."""
    saved = CheckpointReader(checkpoint)
    return {name: saved.read(name) for name in saved.names()}


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All but the optimizer state."""
    return {name: tensor for name, tensor in load_tensors(checkpoint).items() if ":" not in name}


def require_equal_files(one: Path, other: Path) -> None:
    """The files of tensors of two checkpoints of the same layout are equal bit by bit."""
    names = read_manifest(one).tensor_files
    assert names
    assert names == read_manifest(other).tensor_files
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
