"""Feed-forwards: what each position goes through on its own. Of a block, or of the experts that all visit."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
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
        """The first two as one, where they are."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position on its own."""
        if self.gate_up is None:
            return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        gate_BTF, up_BTF = self.gate_up.matmul(x_BTD)
        return self.down(F.silu(gate_BTF) * up_BTF)


class FeedForward(nn.Module):
    """Two matrices around GELU: ``down(gelu(up(x)))``."""

    def __init__(self, model: DecoderModel, width: int) -> None:
        super().__init__()
        self.approximate = gelu_form(model)
        self.up = Linear(model.hidden_size, width, bias=model.ffn_bias)
        self.down = Linear(width, model.hidden_size, bias=model.ffn_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each position on its own."""
        return self.down(F.gelu(self.up(x_BTD), approximate=self.approximate))


def gelu_form(model: DecoderModel) -> str:
    """Torch's name for the model's form of GELU."""
    return "tanh" if model.activation == "gelu_tanh" else "none"


def build_feed_forward(model: DecoderModel, width: int) -> GatedFeedForward | FeedForward:
    """The feed-forward that the model names, so wide inside."""
    return (GatedFeedForward if model.activation == "swiglu" else FeedForward)(model, width)
