"""The plain torch baseline: a Llama and its training step, after torchtitan's.

Each block is compiled separately. Attention is torch's. Linear layers run in bf16 (autocast) with float32
weights, the residual stream is bf16, the loss is a compiled cross-entropy over all logits, AdamW is torch's
fused one. Nothing here is Meshwright's.

Shape suffixes: B batch, T tokens of a sequence, D hidden, H heads, E head size.
"""
# ruff: noqa: N803, N806, N815

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    theta: float
    length: int


@contextmanager
def fast_attention(device: str, first: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Iterator[None]:
    """Use cuDNN attention, or the requested kernel; flash attention as fallback; any on a CPU."""
    if device != "cuda":
        yield
        return
    with sdpa_kernel(list(dict.fromkeys([first, SDPBackend.FLASH_ATTENTION])), set_priority=True):
        yield


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """RoPE in float32, as in torchtitan."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BHTE.float() * cos_TE + rotated * sin_TE).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal attention with grouped query heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.hidden // sizes.heads
        self.grouped = sizes.heads != sizes.kv_heads
        self.wq = nn.Linear(sizes.hidden, sizes.heads * self.size, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(sizes.heads * self.size, sizes.hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Attention."""
        batch, length, _ = x_BTD.shape
        q, k, v = (
            w(x_BTD).view(batch, length, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, cos_TE, sin_TE), rotate(k, cos_TE, sin_TE)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.ffn, bias=False)
        self.w2 = nn.Linear(sizes.ffn, sizes.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Feed-forward."""
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """Attention and feed-forward with pre-norm and residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.hidden, eps=1e-5) for _ in range(2))
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """One block."""
        normed = self.attention_norm(x_BTD).to(x_BTD.dtype)
        x_BTD = x_BTD + self.attention(normed, cos_TE, sin_TE)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD).to(x_BTD.dtype))


class Llama(nn.Module):
    """The model; build it on its device."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        size = sizes.hidden // sizes.heads
        frequencies = sizes.theta ** (-torch.arange(0, size, 2).float() / size)
        angles_TE = torch.outer(torch.arange(sizes.length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_TE", angles_TE.cos(), persistent=False)
        self.register_buffer("sin_TE", angles_TE.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits."""
        x_BTD = self.embed(tokens_BT).bfloat16()
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TE, self.sin_TE)
        return self.head(self.norm(x_BTD))


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean loss, in float32."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def build_step(sizes: Sizes, batch: int, device: str, backend: str) -> Callable[[], Tensor]:
    """A training step on fresh random tokens; returns the loss without synchronizing.

    Args:
        sizes: Of the model.
        batch: Sequences per step.
        device: Where it runs.
        backend: Backend of torch.compile.
    """
    with torch.device(device):
        model = Llama(sizes)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    loss_of = torch.compile(cross_entropy, backend=backend, dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    parameters = list(model.parameters())

    def step() -> Tensor:
        tokens = torch.randint(0, sizes.vocab, (batch, sizes.length + 1), device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = loss_of(logits, tokens[:, 1:])
            del logits
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
