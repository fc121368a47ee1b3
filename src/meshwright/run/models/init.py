"""Initial weights: a function of (seed, parameter name), or of a Hugging Face folder; of nothing else.

Not of rank, order, device or layout: whatever a rank keeps of a parameter, it is cut from the same whole.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.plan.decoder_memory import loss_chunk
from meshwright.plan.parts import Part
from meshwright.plan.shapes import list_parameters
from meshwright.plan.tensor import held_model
from meshwright.run.models.decoder import Decoder, Stages, build_rope
from meshwright.run.models.hf import HfParameters
from meshwright.run.models.resnet import ResNet
from meshwright.run.parallel.experts import apply_experts
from meshwright.run.parallel.pieces import Pieces
from meshwright.run.parallel.seat import Seat
from meshwright.run.parallel.tensor import apply_split
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model, ResNetModel
from meshwright.survive.hf.weights import require_weights


def parameter_seed(seed: int, name: str) -> int:
    """The seed of one parameter's generator: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class WeightSource(Protocol):
    """Where first values come from."""

    def whole(self, name: str) -> Tensor:
        """The first values of one parameter, all of them, in float32 on the CPU."""


class DrawnWeights:
    """Norms are one, biases zero, the rest is drawn, each parameter from a generator of its own.

    Convolutions, which have four dims, are drawn as He et al. (2015) say, by the values that leave them.

    Numbers are drawn on the CPU whatever the device, so that a run on GPUs starts from the same weights.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(model)}
        self._seed, self._std = seed, model.init_std

    def whole(self, name: str) -> Tensor:
        """A parameter's first values."""
        return draw(name, self._shapes[name], self._seed, self._std)


def find_weight_source(job: Job, from_hf: bool) -> WeightSource:
    """Those of the folder ``model.hf``, which must have some, or drawn ones."""
    if not from_hf:
        return DrawnWeights(job.model, job.train.seed)
    assert isinstance(job.model, DecoderModel), "only decoders come from Hugging Face"
    return HfParameters(require_weights(job.model), job.model)


class PieceWeights:
    """This rank's pieces of the first values."""

    def __init__(self, weights: WeightSource, pieces: Pieces) -> None:
        self._weights, self._pieces = weights, pieces

    def whole(self, name: str) -> Tensor:
        """All of a parameter that the rank holds."""
        return self._pieces.cut(name, self._weights.whole(name))


@torch.no_grad()
def fill(network: nn.Module, names: Iterable[str], weights: WeightSource, device: torch.device) -> None:
    """Give parameters their first values; those that lie nowhere yet get their memory, too."""
    for name in names:
        values = weights.whole(name)
        if network.get_parameter(name).is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(network.get_submodule(owner), leaf, nn.Parameter(values.to(device)))
        else:
            network.get_parameter(name).copy_(values)


def draw(name: str, shape: Sequence[int], seed: int, std: float) -> Tensor:
    """The initial values of one parameter, whole, on the CPU."""
    if len(shape) == 1:
        return torch.full(tuple(shape), 0.0 if name.endswith(".bias") else 1.0)
    fan_out = shape[0] * math.prod(shape[2:])
    spread = math.sqrt(2 / fan_out) if len(shape) == 4 else std
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    return torch.empty(tuple(shape), dtype=torch.float32).normal_(0.0, spread, generator=generator)


def build_model(
    job: Job,
    device: torch.device,
    weights: WeightSource | None = None,
    seat: Seat | None = None,
    parts: Sequence[Part] = (),
) -> Decoder | ResNet | Stages:
    """The job's model with its initial weights, on its device; without any where it will be cut.

    Args:
        job: The settled job.
        device: Where the weights lie.
        weights: Its first values, cut as it is; None draws them.
        seat: What the rank has of matrices, positions and experts; None for all.
        parts: The stages that the rank holds, in a pipeline.
    """
    model = job.model
    weights = weights or find_weight_source(job, from_hf=False)
    network: Decoder | ResNet
    if job.layout.pp > 1:
        return _build_stages(job, device, weights, seat, parts)
    if seat is not None and isinstance(model, DecoderModel):
        return _build_decoder(job, device, weights, seat)
    with torch.device(device):
        if isinstance(model, ResNetModel):
            network = ResNet(model, job.layout.recompute)
        else:
            network = Decoder(model, job.data.seq_len, loss_chunk(job, model), job.layout.recompute)
    names = [name for name, _ in network.named_parameters()]
    fill(network, names, weights, device)
    return network


def tie(network: Decoder, job: Job) -> None:
    """A tied head is the embedding, also where the embedding has just come to lie somewhere."""
    tied = isinstance(job.model, DecoderModel) and job.model.tied_embeddings
    if tied and network.last and hasattr(network, "embed"):
        network.head.weight = network.embed.weight


def _build_stages(
    job: Job, device: torch.device, weights: WeightSource, seat: Seat | None, parts: Sequence[Part]
) -> Stages:
    """The stages of a rank; they share the tables of rotations, and an embedding that is the head, too."""
    stages = [_build_decoder(job, device, weights, seat, part) for part in parts]
    first = stages[0]
    for stage, part in list(zip(stages, parts, strict=True))[1:]:
        if first.rotary:
            stage.rope_cos, stage.rope_sin = first.rope_cos, first.rope_sin
        if part.lent:
            stage.head.lender = (first.embed,)
    return Stages(stages)


def _build_decoder(
    job: Job, device: torch.device, weights: WeightSource, seat: Seat | None, part: Part | None = None
) -> Decoder:
    """A decoder, or a stage of one, with this rank's part of every matrix; its tables are on the device.

    Where it will be cut over the ranks of data, its parameters lie nowhere yet.
    """
    model = held_model(job)
    assert isinstance(model, DecoderModel), "the legality table shards decoders only"
    with torch.device("meta"):
        chunk, length = loss_chunk(job, model), job.data.seq_len // job.layout.cp
        context = None if seat is None else seat.context
        network = Decoder(model, length, chunk, job.layout.recompute, part, context)
    if network.rotary:
        positions = network.context.own_positions(network.seq_len, device)
        network.rope_cos, network.rope_sin = build_rope(model, positions)
    if seat is not None and seat.split is not None:
        apply_split(network, seat.split)
        tie(network, job)
    if seat is not None:
        apply_experts(network, job, seat.ranks, seat.split, seat.context)
    if job.layout.zero < 2:
        fill(network, [name for name, _ in network.named_parameters()], weights, device)
        tie(network, job)
    return network
