"""Decoders with copies in 16 bits and our own kernels, and what autograd keeps of them; for several tests."""

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


def make_ready(
    net: Decoder,
    stream: torch.dtype,
    *,
    own: bool,
    copies: bool,
    scaled: bool,
    gradients: torch.dtype = torch.float32,
    gemms: Gemms = TORCH_GEMMS,
) -> None:
    """As a session does for a compiled job in bf16 or, where ``scaled``, in fp8; without copies it stays."""
    if scaled:
        convert_linears_to_fp8(net, weight_grads=True)
    if copies:
        net.residual_dtype = stream
        net.weight_copies = WeightCopies(net, torch.bfloat16)
    if own:
        convert_to_triton(net, gradients, gemms)


@contextmanager
def note_kept(net: Decoder) -> Iterator[dict[int, int]]:
    """Bytes of what autograd keeps meanwhile, by storage: not parameters, buffers and copies of matrices."""
    known = {t.untyped_storage().data_ptr() for t in (*net.buffers(), *net.weight_copies.copies.values())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
