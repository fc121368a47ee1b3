"""Decoders with bf16 weight copies and Triton blocks, and the bytes that autograd saves for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import convert_to_triton
from meshwright.models.decoder import Decoder
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.linear import convert_linears_to_fp8


def convert(
    net: Decoder,
    residual_dtype: torch.dtype,
    *,
    triton: bool,
    copies: bool,
    uses_fp8: bool,
    grad_dtype: torch.dtype = torch.float32,
    gemms: Gemms = TORCH_GEMMS,
) -> None:
    """As ``apply_block_backend`` does in bf16 or fp8; without copies it stays float32."""
    if uses_fp8:
        convert_linears_to_fp8(net, weight_grads=True)
    if copies:
        net.residual_dtype = residual_dtype
        net.weight_copies = WeightCopies(net, torch.bfloat16)
    if triton:
        convert_to_triton(net, grad_dtype, gemms)


@contextmanager
def note_saved(net: Decoder) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves meanwhile, by storage; not parameters, buffers and weight copies."""
    known = {t.untyped_storage().data_ptr() for t in (*net.buffers(), *net.weight_copies.copies.values())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
