"""Parameters and FLOPs of any decoder, experts and latent attention included."""

from __future__ import annotations

from meshwright.plan.estimate.sizes import attention_parameters
from meshwright.plan.shapes import count_parameters
from meshwright.spec.model import DecoderModel


def total_parameters(model: DecoderModel) -> int:
    """All of them; to the last one for models that run, without norms and biases for the others."""
    if model.num_experts is None and model.attention == "heads":
        return count_parameters(model)
    tables = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    return round(tables + _blocks(model, model.num_experts or 0))


def active_parameters(model: DecoderModel) -> float:
    """Those that multiply one token: the head, and of the routed experts the chosen ones."""
    return model.vocab_size * model.hidden_size + _blocks(model, model.experts_per_token or 0)


def _blocks(model: DecoderModel, experts: int) -> float:
    """Matrices of all blocks, with so many routed experts in a layer that has any."""
    entries = 3 if model.activation == "swiglu" else 2
    dense = (model.num_layers - model.expert_layers) * entries * model.hidden_size * model.ffn_size
    one = entries * model.hidden_size * model.expert_width
    routed = model.expert_layers * one * (experts + model.shared_experts)
    router = model.expert_layers * model.hidden_size * (model.num_experts or 0)
    return model.num_layers * attention_parameters(model) + dense + routed + router


def token_flops(model: DecoderModel, seq_len: int) -> float:
    """FLOPs of one token as MFU counts them: 6 a parameter that multiplies it, and causal attention.

    Attention: 2 products x 2 FLOPs x half the sequence (a window where there is one) x width, times 3.
    """
    window = min(model.window or seq_len, seq_len)
    windowed = model.windowed_layers
    # A causal token sees half of the sequence on average; of a window, all but what the start lacks.
    seen = (model.num_layers - windowed) * seq_len / 2 + windowed * (window - window**2 / (2 * seq_len))
    queries = model.num_heads * (model.head_size + (model.rope_head_dim or 0))
    return 6.0 * active_parameters(model) + 6.0 * seen * (queries + model.value_size)
