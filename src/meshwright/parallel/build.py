"""Builds the part of the model that this rank holds: stages, positions, shards and experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.stages import StageSpec
from meshwright.layout.tensor_parallel import local_model
from meshwright.models.decoder import Decoder, Stages, build_rope
from meshwright.models.init import WeightSource, fill, find_weight_source, tie_weights
from meshwright.models.resnet import ResNet
from meshwright.parallel.expert import apply_expert_parallel
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, ResNetModel


class ShardedWeights:
    """This rank's pieces of the first values."""

    def __init__(self, weights: WeightSource, local_shards: LocalShards) -> None:
        self._weights, self._local_shards = weights, local_shards

    def whole(self, name: str) -> Tensor:
        """All of a parameter that the rank holds."""
        return self._local_shards.shard(name, self._weights.whole(name))


def build_model(
    job: Job,
    device: torch.device,
    weights: WeightSource | None = None,
    parallel: ParallelContext | None = None,
    parts: Sequence[StageSpec] = (),
) -> Decoder | ResNet | Stages:
    """The job's model with its initial weights, on its device; without any where it will be cut.

    Args:
        job: The settled job.
        device: Where the weights lie.
        weights: Its first values, cut as it is; None draws them.
        parallel: What the rank has of matrices, positions and experts; None for all.
        parts: The stages that the rank holds, in a pipeline.
    """
    model = job.model
    weights = weights or find_weight_source(job, from_hf=False)
    network: Decoder | ResNet
    if job.layout.pp > 1:
        return _build_stages(job, device, weights, parallel, parts)
    if parallel is not None and isinstance(model, DecoderModel):
        return _build_decoder(job, device, weights, parallel)
    with torch.device(device):
        if isinstance(model, ResNetModel):
            network = ResNet(model, job.layout.recompute)
        else:
            network = Decoder(model, job.data.seq_len, loss_chunk(job, model), job.layout.recompute)
    names = [name for name, _ in network.named_parameters()]
    fill(network, names, weights, device)
    return network


def _build_stages(
    job: Job,
    device: torch.device,
    weights: WeightSource,
    parallel: ParallelContext | None,
    parts: Sequence[StageSpec],
) -> Stages:
    """The stages of a rank; they share the tables of rotations, and an embedding that is the head, too."""
    stages = [_build_decoder(job, device, weights, parallel, part) for part in parts]
    first = stages[0]
    for stage, part in list(zip(stages, parts, strict=True))[1:]:
        if first.uses_rope:
            stage.rope_cos, stage.rope_sin = first.rope_cos, first.rope_sin
        if part.shares_embedding:
            stage.head.tied_embedding = (first.embed,)
    return Stages(stages)


def _build_decoder(
    job: Job,
    device: torch.device,
    weights: WeightSource,
    parallel: ParallelContext | None,
    part: StageSpec | None = None,
) -> Decoder:
    """A decoder, or a stage of one, with this rank's part of every matrix; its tables are on the device.

    Where it will be cut over the ranks of data, its parameters lie nowhere yet.
    """
    model = local_model(job)
    assert isinstance(model, DecoderModel), "the legality table shards decoders only"
    with torch.device("meta"):
        chunk, length = loss_chunk(job, model), job.data.seq_len // job.layout.cp
        context = None if parallel is None else parallel.context
        network = Decoder(model, length, chunk, job.layout.recompute, part, context)
    if network.uses_rope:
        positions = network.context.local_positions(network.seq_len, device)
        network.rope_cos, network.rope_sin = build_rope(model, positions)
    if parallel is not None and parallel.tp is not None:
        apply_tensor_parallel(network, parallel.tp)
        tie_weights(network, job)
    if parallel is not None:
        apply_expert_parallel(network, job, parallel.mesh, parallel.tp, parallel.context)
    if job.layout.zero < 2:
        fill(network, [name for name, _ in network.named_parameters()], weights, device)
        tie_weights(network, job)
    return network
