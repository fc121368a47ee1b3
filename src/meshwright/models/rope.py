"""Rotary position embeddings (RoPE).

Shape suffixes: B batch, T tokens of a sequence, H heads, E head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.spec.model import DecoderModel


def build_rope(model: DecoderModel, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, each (T, head_size), float32."""
    device = positions_T.device
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float64, device=device) / model.head_size
    frequencies = scale_rope_frequencies(model, model.rope_theta**-exponents)
    angles = torch.outer(positions_T.double(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def scale_rope_frequencies(model: DecoderModel, frequencies: Tensor) -> Tensor:
    """Llama 3.1's frequency scaling for longer contexts.

    Low frequencies are divided by ``rope_factor``, high frequencies stay. In between the two are interpolated
    by the number of rotations within the original context length.
    """
    if model.rope_factor is None:
        return frequencies
    rotations = model.rope_original_positions * frequencies / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / model.rope_factor)


def apply_rope(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) by the angle of its position."""
    first, second = x_BHTE.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x_BHTE * cos_TE + rotated * sin_TE).to(x_BHTE.dtype)
