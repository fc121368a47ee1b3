"""Causal attention of a process that has whole sequences, and document masks.

With context parallelism (``layout.cp``) ``parallel.context`` overrides :class:`Context`: the positions of the
local tokens, the mask, and attention to other ranks' keys and values.

The kernel is that of torch's ``scaled_dot_product_attention`` (FlashAttention, cuDNN).

Shape suffixes: B batch, T tokens of a sequence, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

COMPILED_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In order of preference."""


def prefer_fast_attention(device: str) -> AbstractContextManager[None]:
    """Prefer the attention backend of compiled and Triton blocks: cuDNN's on Hopper."""
    return sdpa_kernel(COMPILED_ATTENTION, set_priority=True) if device == "cuda" else nullcontext()


def document_mask(segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask, (B, 1, T, T): 0 for the own and earlier positions of the same document, else -inf.

    Built once for all blocks, in the dtype of the scores: attention would convert a boolean mask into this
    form in every block, and save it there.
    """
    seen_BTT = (segments_BT.unsqueeze(2) == segments_BT.unsqueeze(1)).tril_()
    return additive_mask(seen_BTT, dtype)


def additive_mask(seen_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask for all heads: 0 where a position is visible, else -inf."""
    hidden = torch.full(seen_BTT.shape, float("-inf"), dtype=dtype, device=seen_BTT.device)
    return hidden.masked_fill_(seen_BTT, 0.0).unsqueeze(1)


def document_positions(segments_BT: Tensor) -> Tensor:
    """Positions that restart with every document."""
    length = segments_BT.shape[1]
    index_BT = torch.arange(length, device=segments_BT.device).expand_as(segments_BT)
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def causal_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
    """Causal grouped-query attention; a mask replaces the causal one."""
    groups = q_BHTE.shape[1] // k_BKTE.shape[1]
    grouped = groups > 1
    if grouped and q_BHTE.is_cuda and (q_BHTE.dtype == torch.float32 or mask is not None):
        # No fused GPU kernel supports grouped heads in float32 or with a mask: torch would materialise the
        # whole score matrix.
        k_BKTE = k_BKTE.repeat_interleave(groups, dim=1)
        v_BKTE = v_BKTE.repeat_interleave(groups, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


class Context:
    """The positions of this rank's tokens: without context parallelism, all of them."""

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of the local tokens, in their local order.

        Args:
            length: Local tokens of a sequence.
            device: Device of the result.
        """
        return torch.arange(length, device=device)

    def local_columns(self, whole_BT: Tensor) -> Tensor:
        """Select the local tokens from a tensor over whole sequences."""
        return whole_BT

    def build_mask(self, segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """The document mask that :meth:`attend` takes, built once for all blocks.

        Args:
            segments_BT: The document index of each token of whole sequences.
            dtype: Dtype of the scores.
        """
        return document_mask(segments_BT, dtype)

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, hidden: Tensor | None) -> Tensor:
        """Attention of the local queries to all positions that are visible to them."""
        return causal_attention(q_BHTE, k_BKTE, v_BKTE, hidden)
