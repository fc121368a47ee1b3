"""Initial weights: a function of (seed, parameter name), or of a Hugging Face folder, and of nothing else.

They do not depend on rank, order, device or layout: each rank takes its shard of the same full parameter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meshwright.checkpoint.hf.weights import require_weights
from meshwright.layout.fsdp_groups import chunk_rows
from meshwright.models.decoder import Decoder
from meshwright.models.hf_parameters import HfWeightSource
from meshwright.models.weight_source import RandomWeights, WeightSource
from meshwright.spec.cluster import count_cores
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def find_weight_source(job: Job, from_hf: bool) -> WeightSource:
    """The weights of the folder ``model.hf``, which must have some, or random ones."""
    if not from_hf:
        threads = max(1, count_cores() // job.cluster.devices_per_node)
        return RandomWeights(job.model, job.train.seed, threads)
    assert isinstance(job.model, DecoderModel), "only decoders come from Hugging Face"
    return HfWeightSource(require_weights(job.model), job.model)


@torch.no_grad()
def fill(
    network: nn.Module,
    names: Iterable[str],
    weights: WeightSource,
    device: torch.device,
    shard: int = 0,
    num_shards: int = 1,
) -> None:
    """Initialise parameters; those on the meta device are allocated.

    Args:
        network: Has the parameters.
        names: Which ones.
        weights: Their values.
        device: Where they are allocated.
        shard: The shard of rows that is given values; the other rows are left as they are.
        num_shards: How many shards of rows there are.
    """
    for name in names:
        parameter = network.get_parameter(name)
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            copied, shape = num_shards == 1 and not weights.is_zero, parameter.shape
            values = weights.full_tensor(name).to(device) if copied else torch.empty(shape, device=device)
            parameter = nn.Parameter(values)
            setattr(network.get_submodule(owner), leaf, parameter)
            if copied:
                continue
        rows = chunk_rows(len(parameter), num_shards, shard)
        if rows and weights.is_zero:
            parameter[rows.start : rows.stop].zero_()
        elif rows:
            parameter[rows.start : rows.stop].copy_(weights.rows(name, rows.start, rows.stop))


def tie_weights(network: Decoder, job: Job) -> None:
    """Tie the head's weight to the embedding's, which may just have been allocated."""
    tied = isinstance(job.model, DecoderModel) and job.model.tied_embeddings
    if tied and network.last and hasattr(network, "embed"):
        network.head.weight = network.embed.weight
