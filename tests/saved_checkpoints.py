"""The tensors of checkpoints, for tests that compare them."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from meshwright.runs.faults.checks.resharding import load_tensors, require_equal_files

__all__ = ["load_tensors", "load_weights", "require_equal_files"]


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All but the optimizer state."""
    return {name: tensor for name, tensor in load_tensors(checkpoint).items() if ":" not in name}
