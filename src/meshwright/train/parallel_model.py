"""The model of a rank with what trains it in parallel: wrapper, pipeline, gradient reduction, shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.decoder import Decoder, Stages
from meshwright.models.resnet import ResNet
from meshwright.parallel.backup_replicas import BackupReplicas
from meshwright.parallel.bucket_reducer import BucketReducer
from meshwright.parallel.parallel_context import ParallelContext
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.rank_parameters import RankParameters


@dataclass(frozen=True)
class ParallelModel:
    """The model of a rank after all axes are applied."""

    model: Decoder | ResNet | Stages
    """Without the data-parallel wrapper."""
    module: nn.Module
    """With it (DDP or FSDP2)."""
    pipeline: Pipeline | None
    """Runs the stages, with ``layout.pp > 1``."""
    reducer: BucketReducer | None
    """All-reduces gradients, where neither the module nor the pipeline does."""
    parallel: ParallelContext
    """This rank's shards by the inner axes: cp, tp, ep."""
    rank_parameters: RankParameters
    """The parameters that this rank updates and keeps optimizer state for."""
    backup: BackupReplicas | None
    """Sums the gradients of replicas that choose their samples, with ``layout.backup_replicas > 0``."""
    weight_copies: WeightCopies | None
    """bf16 copies of the weights that GEMMs read."""
