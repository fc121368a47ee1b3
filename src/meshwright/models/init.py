"""Initial weights: a function of (seed, parameter name), or of a Hugging Face folder, and of nothing else.

They do not depend on rank, order, device or layout: each rank takes its shard of the same full parameter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.hf.weights import require_weights
from meshwright.layout.parameters import list_parameters
from meshwright.models.decoder import Decoder
from meshwright.models.hf_parameters import HfWeightSource
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model


def parameter_seed(seed: int, name: str) -> int:
    """The seed of a parameter's generator: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class WeightSource(Protocol):
    """A source of initial weights."""

    def full_tensor(self, name: str) -> Tensor:
        """The full initial values of a parameter, in float32 on the CPU."""


class RandomWeights:
    """Norms are one, biases zero; other parameters are random, each from its own generator.

    Convolutions, which have four dims, are initialised after He et al. (2015) with their fan-out. Random
    numbers are drawn on the CPU for every device, so that a run on GPUs starts from the same weights.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(model)}
        self._seed, self._std = seed, model.init_std

    def full_tensor(self, name: str) -> Tensor:
        """The full initial values of a parameter."""
        return draw(name, self._shapes[name], self._seed, self._std)


def find_weight_source(job: Job, from_hf: bool) -> WeightSource:
    """The weights of the folder ``model.hf``, which must have some, or random ones."""
    if not from_hf:
        return RandomWeights(job.model, job.train.seed)
    assert isinstance(job.model, DecoderModel), "only decoders come from Hugging Face"
    return HfWeightSource(require_weights(job.model), job.model)


@torch.no_grad()
def fill(network: nn.Module, names: Iterable[str], weights: WeightSource, device: torch.device) -> None:
    """Initialise parameters; those on the meta device are allocated."""
    for name in names:
        values = weights.full_tensor(name)
        if network.get_parameter(name).is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(owner), leaf, nn.Parameter(values.to(device)))
        else:
            network.get_parameter(name).copy_(values)


def draw(name: str, shape: Sequence[int], seed: int, std: float) -> Tensor:
    """The full initial values of one parameter, on the CPU."""
    if len(shape) == 1:
        return torch.full(tuple(shape), 0.0 if name.endswith(".bias") else 1.0)
    fan_out = shape[0] * math.prod(shape[2:])
    spread = math.sqrt(2 / fan_out) if len(shape) == 4 else std
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    return torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, spread, generator=generator)


def tie_weights(network: Decoder, job: Job) -> None:
    """Tie the head's weight to the embedding's, which may just have been allocated."""
    tied = isinstance(job.model, DecoderModel) and job.model.tied_embeddings
    if tied and network.last and hasattr(network, "embed"):
        network.head.weight = network.embed.weight
