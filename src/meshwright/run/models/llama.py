"""A Llama-shaped decoder: grouped-query attention, rotary positions, RMSNorm, SwiGLU.

Parameter names and registration order are the contract with ``plan.shapes``, which lists the same table
without torch; a test holds the two together.

Shape suffixes: B batch, T tokens of a sequence, D hidden, H query heads, K key heads, E head size,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor, nn

from meshwright.spec.model import Model


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32 whatever the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim.

        Under autocast the output is cast here, once: left to autocast, each product that reads it would
        cast, and keep, a copy of its own (three for attention, two for the feed-forward).
        """
        normal = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        if torch.is_autocast_enabled(x.device.type):
            return normal.to(torch.get_autocast_dtype(x.device.type))
        return normal.to(x.dtype)


def build_rope(seq_len: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, each (seq_len, head_size), float32."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Turn each pair (i, i + E/2) by its position's angle."""
    first, second = x_BHTE.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHTE * cos_TE + turned * sin_TE).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share one key and value head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_size = model.head_size
        self.groups = model.num_heads // model.num_kv_heads
        self.wq = nn.Linear(model.hidden_size, model.query_size, bias=False)
        self.wk = nn.Linear(model.hidden_size, model.kv_size, bias=False)
        self.wv = nn.Linear(model.hidden_size, model.kv_size, bias=False)
        self.wo = nn.Linear(model.query_size, model.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """Mix along the sequence; position t sees positions up to t."""
        batch, length, _ = x_BTD.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_size).transpose(1, 2)

        q_BHTE = apply_rope(heads(self.wq(x_BTD)), cos_TE, sin_TE)
        k_BKTE = apply_rope(heads(self.wk(x_BTD)), cos_TE, sin_TE)
        v_BKTE = heads(self.wv(x_BTD))
        grouped = self.groups > 1
        if grouped and q_BHTE.is_cuda and q_BHTE.dtype == torch.float32:
            # No fused GPU kernel takes grouped heads in float32: torch would build the whole score matrix.
            k_BKTE = k_BKTE.repeat_interleave(self.groups, dim=1)
            v_BKTE = v_BKTE.repeat_interleave(self.groups, dim=1)
            grouped = False
        mixed_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped
        )
        return self.wo(mixed_BHTE.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position on its own."""
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.ffn = FeedForward(model)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        """One block."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """Token ids in; logits, or the summed loss where targets are given, out."""

    def __init__(self, model: Model, seq_len: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embed.weight
        cos_TE, sin_TE = build_rope(seq_len, model.head_size, model.rope_theta, self.embed.weight.device)
        self.rope_cos: Tensor
        self.rope_sin: Tensor
        self.register_buffer("rope_cos", cos_TE, persistent=False)
        self.register_buffer("rope_sin", sin_TE, persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or the loss **summed** over the targets that are not ``IGNORED``.

        The caller divides by the number of targets in the whole global batch: a mean here would weigh
        ranks and micro-batches instead of tokens.
        """
        length = tokens_BT.shape[1]
        assert length <= self.seq_len, f"{length} tokens, but positions are built for {self.seq_len}"
        cos_TE, sin_TE = self.rope_cos[:length], self.rope_sin[:length]
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORED, reduction="sum"
        )


IGNORED = -100
"""A target that carries no loss: padding, a zero-weight sample."""
