"""Attention as a block of a decoder calls it: along sequences of which this process has every position.

Where ranks share a sequence (``layout.cp``), ``run.parallel.context`` has the same with other ranks' keys and
values. What is alike is the interface: where the own tokens stand, what is hidden from them, and how queries
mix.

Shape suffixes: B batch, T tokens of a sequence, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

COMPILED_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""In the order in which they are asked."""


def prefer_fast_attention(device: str) -> AbstractContextManager[None]:
    """Of the kernels that can compute it, the one that compiled blocks take: on Hopper, cuDNN's."""
    return sdpa_kernel(COMPILED_ATTENTION, set_priority=True) if device == "cuda" else nullcontext()


def document_mask(segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, (B, 1, T, T): 0 for earlier positions of the same document and itself.

    Made once for all blocks, in the precision of the scores: attention would turn a mask of truth values into
    this form in every block, and keep it there.
    """
    seen_BTT = (segments_BT.unsqueeze(2) == segments_BT.unsqueeze(1)).tril_()
    return additive_mask(seen_BTT, dtype)


def additive_mask(seen_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of all heads: 0 where something is seen, else minus infinity."""
    hidden = torch.full(seen_BTT.shape, float("-inf"), dtype=dtype, device=seen_BTT.device)
    return hidden.masked_fill_(seen_BTT, 0.0).unsqueeze(1)


def document_positions(segments_BT: Tensor) -> Tensor:
    """Positions that begin again with every document."""
    length = segments_BT.shape[1]
    index_BT = torch.arange(length, device=segments_BT.device).expand_as(segments_BT)
    begins_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    begins_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def causal_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None) -> Tensor:
    """Position t sees positions up to t, of its own document with a mask; heads may share key heads."""
    groups = q_BHTE.shape[1] // k_BKTE.shape[1]
    grouped = groups > 1
    if grouped and q_BHTE.is_cuda and (q_BHTE.dtype == torch.float32 or mask is not None):
        # No fused GPU kernel takes grouped heads in float32, or with a mask: torch would build the whole
        # score matrix.
        k_BKTE = k_BKTE.repeat_interleave(groups, dim=1)
        v_BKTE = v_BKTE.repeat_interleave(groups, dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        q_BHTE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


class Context:
    """Where this process's tokens stand in their sequences: all of them are here."""

    def local_positions(self, length: int, device: torch.device) -> Tensor:
        """The positions of the own tokens, in the order in which they lie here.

        Args:
            length: Tokens of a sequence that lie here.
            device: Where the result is wanted.
        """
        return torch.arange(length, device=device)

    def local_columns(self, whole_BT: Tensor) -> Tensor:
        """Of one number a token of whole sequences, those of the own tokens."""
        return whole_BT

    def build_mask(self, segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """What ``mix`` wants to know of documents, made once for all blocks.

        Args:
            segments_BT: The document of each token, of whole sequences.
            dtype: Of the scores.
        """
        return document_mask(segments_BT, dtype)

    def attend(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, hidden: Tensor | None) -> Tensor:
        """Attention of the own queries to all positions that they may see."""
        return causal_attention(q_BHTE, k_BKTE, v_BKTE, hidden)
