"""Norms that compute in float32 and return the compute dtype (mixed precision)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn

from meshwright.spec.model import DecoderModel


class RMSNorm(nn.Module):
    """RMS norm of the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return cast_to_compute_dtype(
            F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps), x
        )


class LayerNorm(nn.Module):
    """Layer norm of the last dim."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps)
        return cast_to_compute_dtype(normed, x)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of GEMMs that read ``x``: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def cast_to_compute_dtype(normed: Tensor, x: Tensor) -> Tensor:
    """A norm's output in the dtype of the GEMMs that read it.

    Cast here, once: autocast would cast and save one copy per GEMM (three for attention, two for the
    feed-forward).
    """
    return normed.to(compute_dtype(x))


def build_norm(model: DecoderModel) -> RMSNorm | LayerNorm:
    """The model's kind of norm."""
    kind = RMSNorm if model.norm == "rms" else LayerNorm
    return kind(model.hidden_size, model.norm_eps)
