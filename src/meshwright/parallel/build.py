"""Builds the part of the model that this rank holds: stages, positions, shards and experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.stages import Part
from meshwright.layout.tensor_parallel import held_model
from meshwright.models.decoder import Decoder, Stages, build_rope
from meshwright.models.init import WeightSource, fill, find_weight_source, tie
from meshwright.models.resnet import ResNet
from meshwright.parallel.expert import apply_experts
from meshwright.parallel.local_shards import Pieces
from meshwright.parallel.parallel_context import Seat
from meshwright.parallel.tensor import apply_split
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, ResNetModel


class PieceWeights:
    """This rank's pieces of the first values."""

    def __init__(self, weights: WeightSource, pieces: Pieces) -> None:
        self._weights, self._pieces = weights, pieces

    def whole(self, name: str) -> Tensor:
        """All of a parameter that the rank holds."""
        return self._pieces.cut(name, self._weights.whole(name))


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
