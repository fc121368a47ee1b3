"""Feed-forward layers of blocks and of shared experts."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn

from meshwright.models.linear import Linear, MergedLinear
from meshwright.spec.model import DecoderModel


class GatedFeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, model: DecoderModel, width: int) -> None:
        super().__init__()
        self.gate = Linear(model.hidden_size, width, bias=model.ffn_bias)
        self.up = Linear(model.hidden_size, width, bias=model.ffn_bias)
        self.down = Linear(width, model.hidden_size, bias=model.ffn_bias)
        self.gate_up: MergedLinear | None = None
        """Gate and up as one GEMM, if bf16 weight copies are merged."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output for each position."""
        if self.gate_up is None:
            return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        gate_BTF, up_BTF = self.gate_up.matmul(x_BTD)
        return self.down(F.silu(gate_BTF) * up_BTF)


class FeedForward(nn.Module):
    """A GELU feed-forward: ``down(gelu(up(x)))``."""

    def __init__(self, model: DecoderModel, width: int) -> None:
        super().__init__()
        self.approximate = gelu_form(model)
        self.up = Linear(model.hidden_size, width, bias=model.ffn_bias)
        self.down = Linear(width, model.hidden_size, bias=model.ffn_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The output for each position."""
        return self.down(F.gelu(self.up(x_BTD), approximate=self.approximate))


def gelu_form(model: DecoderModel) -> str:
    """The ``approximate`` argument of torch's GELU."""
    return "tanh" if model.activation == "gelu_tanh" else "none"


def build_feed_forward(model: DecoderModel, width: int) -> GatedFeedForward | FeedForward:
    """The model's kind of feed-forward with an inner width."""
    return (GatedFeedForward if model.activation == "swiglu" else FeedForward)(model, width)
