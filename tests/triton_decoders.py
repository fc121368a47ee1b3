"""Small decoders with bf16 weight copies and Triton blocks, and the bytes that autograd saves for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.bf16_weights import WeightCopies
from meshwright.models.block_backend import convert_to_triton
from meshwright.models.decoder import Decoder
from meshwright.models.kernels.gemm import TORCH_GEMMS, Gemms
from meshwright.models.linear import convert_linears_to_fp8
from meshwright.spec.model import DecoderModel

SHAPE = DecoderModel(num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=128)
SAMPLES, LENGTH = 4, 16
EXACT, LOW = torch.float32, torch.bfloat16


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
    """Convert as ``apply_block_backend`` does for bf16 or fp8; without copies the decoder stays float32."""
    if uses_fp8:
        convert_linears_to_fp8(net, weight_grads=True)
    if copies:
        net.residual_dtype = residual_dtype
        net.weight_copies = WeightCopies(net, torch.bfloat16)
    if triton:
        convert_to_triton(net, grad_dtype, gemms)


def build(
    model: DecoderModel = SHAPE,
    residual_dtype: torch.dtype = LOW,
    *,
    triton: bool = True,
    copies: bool = True,
    recompute: str = "selective",
    uses_fp8: bool = False,
    grad_dtype: torch.dtype = EXACT,
    gemms: Gemms = TORCH_GEMMS,
) -> Decoder:
    """A decoder with the same weights every time; without copies it is the float32 reference."""
    net = Decoder(model, LENGTH, 24, recompute)  # three loss chunks: 24, 24 and 16 tokens
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn / 10 if parameter.dim() == 1 else drawn / 8)
    convert(
        net,
        residual_dtype,
        triton=triton,
        copies=copies,
        uses_fp8=uses_fp8,
        grad_dtype=grad_dtype,
        gemms=gemms,
    )
    net.head.uses_fused_loss = False  # the fused loss would be compiled
    return net


def batch(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets (some ignored), and document numbers that change within sequences."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, 128, (2, SAMPLES, LENGTH), generator=generator)
    targets[:, ::5] = IGNORE_INDEX
    documents = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.2).cumsum(1)
    return tokens, targets, documents


StepResult = tuple[float, dict[str, torch.Tensor]]


def step(net: Decoder, *, masked: bool = False, low: bool = True, seed: int = 2) -> StepResult:
    """Loss and gradients of a micro-batch; gradients accumulate."""
    tokens, targets, documents = batch(seed)
    with torch.autocast("cpu", LOW, enabled=low):
        loss = net(tokens, targets, documents if masked else None)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in net.named_parameters()}


@contextmanager
def record_saved_bytes(net: Decoder) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves in the block, by storage, without parameters, buffers and weight copies."""
    state = {t.untyped_storage().data_ptr() for t in (*net.buffers(), *net.weight_copies.copies.values())}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage.data_ptr() not in state:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        yield saved
