"""Weights of a Hugging Face folder under our names, one tensor at a time."""

from __future__ import annotations

from safetensors import safe_open
from torch import Tensor

from meshwright.spec.model import DecoderModel
from meshwright.survive.hf.names import list_places
from meshwright.survive.hf.weights import HfWeights


class HfParameters:
    """First values as a folder holds them; its files are mapped, not read."""

    def __init__(self, weights: HfWeights, model: DecoderModel) -> None:
        self._weights = weights
        self._places = list_places(model)

    def whole(self, name: str) -> Tensor:
        """One of our parameters, as a float32 tensor on the CPU; beyond it, nothing takes memory."""
        place = self._places[name]
        stored = self._weights.tensors[place.name]
        with safe_open(stored.file, framework="pt") as file:
            if place.columns is None:
                tensor = file.get_tensor(stored.name)
            else:
                tensor = file.get_slice(stored.name)[..., place.columns]
        return (tensor.T if place.transposed else tensor).float()
