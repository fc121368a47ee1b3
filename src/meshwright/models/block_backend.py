"""Converts a decoder for ``train.block_backend``: eager, compile or triton."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.decoder import Decoder, Stages
from meshwright.models.dtypes import AUTOCAST_DTYPES, RESIDUAL_DTYPES
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.linear import convert_linears_to_fp8
from meshwright.models.moe import MixtureOfExperts
from meshwright.models.norms import RMSNorm
from meshwright.models.triton_block import TritonBlock, TritonEmbedding, TritonRMSNorm
from meshwright.spec.execution import keeps_bf16_grads, resolve_block_backend, uses_bf16_weight_copies
from meshwright.spec.job import Job


def apply_block_backend(model: nn.Module, job: Job, gemms: Gemms = TORCH_GEMMS) -> WeightCopies | None:
    """Convert a model in place to a job's block backend; parameter names stay.

    Args:
        model: A decoder or the stages of one; of any kind for ``eager``.
        job: With its layout settled.
        gemms: Autotuned GEMMs, for ``triton``.

    Returns:
        The bf16 weight copies, if it has any.
    """
    backend, copies = resolve_block_backend(job), None
    if backend == "eager":
        return None
    for decoder in model if isinstance(model, Stages) else (model,):
        assert isinstance(decoder, Decoder), "the legality table compiles decoders only"
        decoder.residual_dtype = RESIDUAL_DTYPES[job.train.residual_dtype]
        if job.train.precision == "fp8":
            convert_linears_to_fp8(decoder, weight_grads=job.train.fp8_weight_grads)
        if uses_bf16_weight_copies(job):
            copies = WeightCopies(decoder, AUTOCAST_DTYPES[job.train.precision])
        if backend == "triton":
            convert_to_triton(decoder, torch.bfloat16 if keeps_bf16_grads(job) else torch.float32, gemms)
        else:
            compile_blocks(decoder, backend=job.train.compile_backend)
    return copies


def convert_to_triton(
    decoder: Decoder, grad_dtype: torch.dtype = torch.float32, gemms: Gemms = TORCH_GEMMS
) -> None:
    """Replace a whole decoder's embedding, blocks and final norm by Triton modules, and fuse its loss.

    Args:
        decoder: With RMS norms, RoPE, SwiGLU, no biases, and bf16 weight copies.
        grad_dtype: Gradient dtype of the blocks' weight gradients.
        gemms: Compute its 16-bit GEMMs.
    """
    head = decoder.head
    assert isinstance(decoder.norm, RMSNorm), "spec.execution.uses_triton_blocks requires RMS norms"
    assert head.weight_copy is not None, "it has bf16 weight copies"
    decoder.embed = TritonEmbedding(decoder.embed, decoder.residual_dtype)
    for name, block in zip(list(decoder.blocks), list(decoder.list_blocks()), strict=True):
        decoder.blocks[name] = TritonBlock(block, grad_dtype, gemms)
    decoder.norm = TritonRMSNorm(decoder.norm, head.weight_copy.dtype)
    head.uses_fused_loss, head.gemms = True, gemms


def compile_blocks(decoder: Decoder, backend: str = "inductor") -> None:
    """Compile each block on its own, so that all share one graph; also the final norm and the loss.

    Args:
        decoder: Or a stage of one.
        backend: Backend of torch.compile; one that generates no code leaves the loss as it is.
    """
    # It would split graphs at DDP's buckets, which lie outside them here, and assert on the buckets' sizes.
    torch._dynamo.config.optimize_ddp = False
    for block in decoder.list_blocks():
        if isinstance(block.ffn, MixtureOfExperts):  # an expert's number of rows depends on the data
            block.ffn.forward = torch.compiler.disable(block.ffn.forward)  # type: ignore[method-assign]
        block.compile(dynamic=False, backend=backend)
    if decoder.last:
        decoder.norm.compile(dynamic=False, backend=backend)
        decoder.head.uses_fused_loss = backend == "inductor"
