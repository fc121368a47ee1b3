"""Weights of a Hugging Face folder into a model, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from safetensors import safe_open
from torch import Tensor, nn

from meshwright.spec.model import DecoderModel
from meshwright.survive.hf.names import list_places
from meshwright.survive.hf.weights import HfWeights


def iter_hf_parameters(weights: HfWeights, model: DecoderModel) -> Iterator[tuple[str, Tensor]]:
    """Our parameters by name, in our order, each as a float32 tensor on the CPU.

    Files are mapped, not read: beyond the tensor that is handed out, nothing takes memory.
    """
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in weights.files}
        for name, place in list_places(model).items():
            stored = weights.tensors[place.name]
            file = files[stored.file]
            if place.columns is None:
                tensor = file.get_tensor(stored.name)
            else:
                tensor = file.get_slice(stored.name)[..., place.columns]
            yield name, (tensor.T if place.transposed else tensor).float()


@torch.no_grad()
def load_hf_weights(network: nn.Module, weights: HfWeights, model: DecoderModel) -> None:
    """Fill every parameter in place."""
    parameters = dict(network.named_parameters())
    for name, tensor in iter_hf_parameters(weights, model):
        parameters.pop(name).copy_(tensor)
    assert not parameters, f"no weights for {sorted(parameters)}"
