"""Applies all axes of a layout to a model, in one order.

The order, as in torchtitan: pp (build the stages), cp, tp, ep, activation checkpointing, block backend
(compile), data parallelism. Each line works on the result of the lines above it. ``train.build`` adds what
runs the steps: the pipeline, the bucket reducer and backup replicas.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from meshwright.models.activation_checkpointing import apply_activation_checkpointing
from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import apply_block_backend
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.weight_source import WeightSource
from meshwright.parallel.build import (
    LocalModel,
    ShardedWeights,
    build_local_model,
    init_weights,
    list_decoders,
)
from meshwright.parallel.context import apply_context_parallel
from meshwright.parallel.data_parallel import apply_data_parallel
from meshwright.parallel.expert import apply_expert_parallel
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.tensor import apply_tensor_parallel
from meshwright.spec.job import Job


class Parallelized(NamedTuple):
    """A model with every axis of the layout applied."""

    model: LocalModel
    """This rank's part of the model, without the data-parallel wrapper."""
    module: nn.Module
    """The same with the wrapper (DDP or FSDP2): what a step calls."""
    parallel: ParallelContext
    """This rank's cp and tp groups, and its tp and ep shards."""
    weight_copies: WeightCopies | None
    """bf16 weight copies, which the GEMMs read."""


def parallelize(job: Job, mesh: Mesh, weights: WeightSource, gemms: Gemms = TORCH_GEMMS) -> Parallelized:
    """Build this rank's part of the model and apply every axis of the layout.

    Args:
        job: The settled job.
        mesh: This rank's groups.
        weights: The initial weights, full.
        gemms: Autotuned GEMMs of Triton blocks.
    """
    parallel = ParallelContext.build(job, mesh)
    if parallel.local_shards is not None:
        weights = ShardedWeights(weights, parallel.local_shards)

    model = build_local_model(job, mesh)  # pp: the stages of this rank
    for decoder in list_decoders(model):
        apply_context_parallel(decoder, parallel.cp)  # cp: its positions, and attention over all positions
        apply_tensor_parallel(decoder, parallel.tp)  # tp: its shard of each dense weight
        apply_expert_parallel(decoder, job, parallel)  # ep: its experts
    init_weights(model, job, weights, mesh)
    apply_activation_checkpointing(model, job.layout.recompute)
    weight_copies = apply_block_backend(model, job, gemms)  # eager, torch.compile or Triton
    module = apply_data_parallel(model, job, mesh, weights)  # dp: DDP, ZeRO-1 or FSDP of the local shards
    return Parallelized(model, module, parallel, weight_copies)
