"""Initial weights as a function of (seed, parameter name), never of rank, order, device or layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.plan.decoder_memory import loss_chunk
from meshwright.plan.tensor import held_model
from meshwright.run.models.decoder import Decoder, build_rope
from meshwright.run.models.hf import load_hf_weights
from meshwright.run.models.resnet import ResNet
from meshwright.run.parallel.split import Split
from meshwright.run.parallel.tensor import apply_split
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, ResNetModel
from meshwright.survive.hf.weights import require_weights


def parameter_seed(seed: int, name: str) -> int:
    """The seed of one parameter's generator: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialise(module: nn.Module, seed: int, std: float) -> None:
    """Fill every parameter in place: norms with one, biases with zero, the rest from its own generator.

    Convolutions, which have four dims, are drawn as He et al. (2015) say, by the values that leave them.

    Numbers are drawn on the CPU whatever the device, so that a run on GPUs starts from the same weights.
    """
    for name, parameter in module.named_parameters():
        parameter.copy_(draw(name, parameter.shape, seed, std))


def draw(name: str, shape: Sequence[int], seed: int, std: float) -> Tensor:
    """The initial values of one parameter, whole, on the CPU."""
    if len(shape) == 1:
        return torch.full(tuple(shape), 0.0 if name.endswith(".bias") else 1.0)
    fan_out = shape[0] * math.prod(shape[2:])
    spread = math.sqrt(2 / fan_out) if len(shape) == 4 else std
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    return torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, spread, generator=generator)


def build_model(
    job: Job, device: torch.device, from_hf: bool = False, split: Split | None = None
) -> Decoder | ResNet:
    """The job's model with its initial weights, on its device; without any where it will be cut.

    Args:
        job: The settled job.
        device: Where the weights lie.
        from_hf: Take them from the folder ``model.hf``, which must have some, and draw none.
        split: Which part of each matrix the rank holds; None for all.
    """
    model = job.model
    network: Decoder | ResNet
    if split is not None:
        return _build_split(job, device, split)
    if job.layout.zero >= 2 and not from_hf:
        return _build_empty(job, device)
    with torch.device(device):
        if isinstance(model, ResNetModel):
            network = ResNet(model, job.layout.recompute)
        else:
            network = Decoder(model, job.data.seq_len, loss_chunk(job, model), job.layout.recompute)
    if from_hf:
        assert isinstance(network, Decoder), "only decoders come from Hugging Face"
        assert isinstance(model, DecoderModel), "and have their table"
        load_hf_weights(network, require_weights(model), model)
    else:
        initialise(network, job.train.seed, model.init_std)
    return network


def place_drawn(network: nn.Module, name: str, job: Job, device: torch.device, split: Split | None) -> None:
    """Give a parameter that lies nowhere its initial values: drawn whole, then cut."""
    shape = network.get_parameter(name).shape if split is None else split.shape(name)
    drawn = draw(name, shape, job.train.seed, job.model.init_std)
    owner, _, leaf = name.rpartition(".")
    values = drawn if split is None else split.cut(name, drawn)
    setattr(network.get_submodule(owner), leaf, nn.Parameter(values.to(device)))


def tie(network: Decoder, job: Job) -> None:
    """A tied head is the embedding, also where the embedding has just come to lie somewhere."""
    if isinstance(job.model, DecoderModel) and job.model.tied_embeddings:
        network.head.weight = network.embed.weight


def _build_split(job: Job, device: torch.device, split: Split) -> Decoder:
    """A decoder with this rank's part of every matrix."""
    network = _build_empty(job, device)
    apply_split(network, split)
    tie(network, job)
    if job.layout.zero < 2:
        for name, _ in list(network.named_parameters()):
            place_drawn(network, name, job, device, split)
        tie(network, job)
    return network


def _build_empty(job: Job, device: torch.device) -> Decoder:
    """A decoder whose parameters lie nowhere yet; its tables are on the device."""
    model = held_model(job)
    assert isinstance(model, DecoderModel), "the legality table shards decoders only"
    with torch.device("meta"):
        network = Decoder(model, job.data.seq_len, loss_chunk(job, model), job.layout.recompute)
    if model.positions == "rope":
        network.rope_cos, network.rope_sin = build_rope(model, job.data.seq_len, device)
    return network
