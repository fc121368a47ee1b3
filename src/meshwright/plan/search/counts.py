"""FLOPs of a token for any decoder, experts, windows and latent attention included."""

from __future__ import annotations

from meshwright.plan.shapes import count_active_matmul_parameters
from meshwright.spec.model import DecoderModel


def token_flops(model: DecoderModel, seq_len: int) -> float:
    """FLOPs of one token as MFU counts them: 6 a parameter that multiplies it, and causal attention.

    Attention: 2 products x 2 FLOPs x half the sequence (a window where there is one) x width, times 3.
    """
    window = min(model.window or seq_len, seq_len)
    windowed = model.windowed_layers
    # A causal token sees half of the sequence on average; of a window, all but what the start lacks.
    seen = (model.num_layers - windowed) * seq_len / 2 + windowed * (window - window**2 / (2 * seq_len))
    queries = model.num_heads * (model.head_size + (model.rope_head_dim or 0))
    return 6.0 * count_active_matmul_parameters(model) + 6.0 * seen * (queries + model.value_size)
