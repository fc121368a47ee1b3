"""Builds this rank's part of the model on the meta device, and gives it its initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.stages import StageSpec, local_stages
from meshwright.models.decoder import Decoder, Stages
from meshwright.models.init import fill, find_weight_source, tie_weights
from meshwright.models.resnet import ResNet
from meshwright.models.rope import build_rope
from meshwright.models.weight_source import WeightSource
from meshwright.parallel.local_shards import LocalShards
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, ResNetModel

LocalModel = Decoder | ResNet | Stages
"""This rank's part of the model: all of it, or its pipeline stages."""


class ShardedWeights(WeightSource):
    """This rank's tp and ep shards of the initial weights."""

    def __init__(self, weights: WeightSource, local_shards: LocalShards) -> None:
        self._weights, self._local_shards = weights, local_shards
        self.is_zero = weights.is_zero

    def full_tensor(self, name: str) -> Tensor:
        """The shard of a parameter."""
        return self.rows(name, 0, self._local_shards.num_rows(name))

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of the shard."""
        whole = None if self._weights.makes_rows else self._weights.full_tensor(name)

        def full_rows(start: int, stop: int) -> Tensor:
            return self._weights.rows(name, start, stop) if whole is None else whole[start:stop]

        return self._local_shards.shard_rows(name, range(first, last), full_rows)


def build_model(job: Job, device: torch.device, weights: WeightSource | None = None) -> Decoder | ResNet:
    """The whole model of one process with its initial weights; None draws them."""
    model: Decoder | ResNet
    with torch.device(device):
        if isinstance(job.model, ResNetModel):
            model = ResNet(job.model, job.layout.recompute)
        else:
            chunk = loss_chunk(job, job.model)
            model = Decoder(job.model, job.data.seq_len, chunk, job.layout.recompute)
    names = [name for name, _ in model.named_parameters()]
    fill(model, names, weights or find_weight_source(job, from_hf=False), device)
    return model


def build_local_model(job: Job, mesh: Mesh) -> LocalModel:
    """The pipeline stages of this pp rank, or the whole model, with the shapes of its tp and ep shards.

    Parameters are on the meta device, except those of a ResNet, which no axis shards.
    """
    if isinstance(job.model, ResNetModel):
        with torch.device(mesh.device):
            return ResNet(job.model)
    with torch.device("meta"):
        stages = [_build_stage(job, stage) for stage in local_stages(job, mesh.pp_rank)]
    return Stages(stages) if job.layout.pp > 1 else stages[0]


def _build_stage(job: Job, stage: StageSpec) -> Decoder:
    assert isinstance(stage.model, DecoderModel), "the legality table shards decoders only"
    length = job.data.seq_len // job.layout.cp
    return Decoder(stage.model, length, loss_chunk(job, stage.model), stage=stage)


def list_decoders(model: nn.Module) -> list[Decoder]:
    """The decoders of a local model: itself, its pipeline stages, or none."""
    return [module for module in model.modules() if isinstance(module, Decoder)]


def init_weights(model: LocalModel, job: Job, weights: WeightSource, mesh: Mesh) -> None:
    """Give a local model its RoPE tables, and below ZeRO-2 its initial weights.

    Under ZeRO-2 and 3, ``apply_fsdp`` initializes the weights. The pipeline stages of a rank share the RoPE
    tables. A tied head on the first stage's rank uses its embedding.
    """
    if isinstance(model, ResNet):
        fill(model, [name for name, _ in model.named_parameters()], weights, mesh.device)
        return
    decoders = list_decoders(model)
    first = decoders[0]
    assert isinstance(job.model, DecoderModel), "the model of a decoder"
    if first.uses_rope:
        tables = build_rope(job.model, first.context.local_positions(first.seq_len, mesh.device))
    for decoder, stage in zip(decoders, local_stages(job, mesh.pp_rank), strict=True):
        if decoder.uses_rope:
            decoder.rope_cos, decoder.rope_sin = tables
        if stage.shares_embedding:
            decoder.head.tied_embedding = (first.embed,)
        if job.layout.zero < 2:
            fill(decoder, [name for name, _ in decoder.named_parameters()], weights, mesh.device)
            tie_weights(decoder, job)
