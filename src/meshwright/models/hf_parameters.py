"""Weights of a Hugging Face folder under our names, one tensor at a time."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.hf.names import list_hf_locations
from meshwright.checkpoint.hf.weights import HfWeights
from meshwright.spec.model import DecoderModel


class HfWeightSource:
    """First values as a folder holds them; its files are mapped, not read."""

    def __init__(self, weights: HfWeights, model: DecoderModel) -> None:
        self._weights = weights
        self._places = list_hf_locations(model)

    def whole(self, name: str) -> Tensor:
        """One of our parameters, as a float32 tensor on the CPU; beyond it, nothing takes memory."""
        place = self._places[name]
        parts = [self._read(piece, place.columns) for piece in place.names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        # In our order of elements: updates and shards want parameters that lie row by row.
        return (tensor.T if place.transposed else tensor).float().contiguous()

    def _read(self, name: str, columns: slice | None) -> Tensor:
        stored = self._weights.tensors[name]
        with safe_open(stored.file, framework="pt") as file:
            if columns is None:
                return file.get_tensor(stored.name)
            return file.get_slice(stored.name)[..., columns]
