"""Initial weights from a Hugging Face folder, by our parameter names, one tensor at a time."""

from __future__ import annotations

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.hf.names import list_hf_locations
from meshwright.checkpoint.hf.weights import HfWeights
from meshwright.core.errors import Problem, UserError
from meshwright.models.weight_source import WeightSource
from meshwright.spec.model import DecoderModel


class HfWeightSource(WeightSource):
    """Initial weights of a folder; its files are memory-mapped."""

    def __init__(self, weights: HfWeights, model: DecoderModel) -> None:
        self._weights = weights
        self._places = list_hf_locations(model)

    def full_tensor(self, name: str) -> Tensor:
        """A parameter as a float32 tensor on the CPU, with storage of its own size."""
        place = self._places[name]
        parts = [self._read(piece, place.columns) for piece in place.names]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Contiguous: optimizers and shards need row-major parameters.
        values = (tensor.T if place.transposed else tensor).float().contiguous()
        self._require_finite(name, values)
        # A slice of a vector, such as a GPT-2 query bias, keeps the storage of the whole vector.
        return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()

    def _require_finite(self, name: str, values: Tensor) -> None:
        if torch.isfinite(values).all():
            return
        bad = [
            piece for piece in self._places[name].names if not torch.isfinite(self._read(piece, None)).all()
        ]
        stored = self._weights.tensors[bad[0]]
        rule = f"has a NaN or an Inf in the tensor {stored.name}"
        fix = "Download the file again, or use other weights"
        raise UserError(Problem("model-hf-weights-not-finite", rule, path=str(stored.file), fix=fix))

    def _read(self, name: str, columns: slice | None) -> Tensor:
        stored = self._weights.tensors[name]
        with safe_open(stored.file, framework="pt") as file:
            if columns is None:
                return file.get_tensor(stored.name)
            return file.get_slice(stored.name)[..., columns]
