"""Applies the block backend of a job (eager, torch.compile or Triton) to the decoders of a model."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.decoder import Decoder, compile_blocks, fuse_blocks
from meshwright.models.dtypes import AUTOCAST_DTYPES, RESIDUAL_DTYPES
from meshwright.models.linear import convert_linears_to_fp8
from meshwright.spec.execution import (
    keeps_bf16_grads,
    uses_bf16_weight_copies,
    uses_eager_blocks,
    uses_triton_blocks,
)
from meshwright.spec.job import Job


def apply_block_backend(model: nn.Module, job: Job) -> None:
    """Set residual dtype, FP8 linears, bf16 weight copies and compiled or Triton blocks, as the job says."""
    if uses_eager_blocks(job):
        return
    for decoder in [module for module in model.modules() if isinstance(module, Decoder)]:
        decoder.residual_dtype = RESIDUAL_DTYPES[job.train.residual_dtype]
        if job.train.precision == "fp8":
            convert_linears_to_fp8(decoder, gradients=job.train.fp8_weight_grads)
        if uses_bf16_weight_copies(job):
            decoder.weight_copies = WeightCopies(decoder, AUTOCAST_DTYPES[job.train.precision])
        if uses_triton_blocks(job):
            fuse_blocks(decoder, torch.bfloat16 if keeps_bf16_grads(job) else torch.float32)
        else:
            compile_blocks(decoder, backend=job.train.compile_backend)
