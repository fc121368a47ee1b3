"""Writes a model as a Hugging Face ``config.json``: the inverse of ``spec.hf_config``."""

from __future__ import annotations

import json
from typing import Any

from meshwright.checkpoint.hf.names import GPT2, MIXTRAL, architecture_of
from meshwright.core.errors import Problem, UserError
from meshwright.spec.model import DecoderModel

_LLAMA_PARTS = {"positions": "rope", "norm": "rms", "activation": "swiglu"}
_MIXTRAL_PARTS = {
    **_LLAMA_PARTS,
    "attention_bias": False,
    "ffn_bias": False,
    "router": "softmax",
    "shared_experts": 0,
    "dense_layers": 0,
}
_GPT2_PARTS = {"norm": "layer", "attention_bias": True, "ffn_bias": True}
_GPT2_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu"}


def require_hf_form(model: DecoderModel) -> str:
    """The transformers class that computes the same as this model.

    Raises:
        UserError: Names each part of the model that the closest class does not have.
    """
    name = architecture_of(model)
    parts = {GPT2: _GPT2_PARTS, MIXTRAL: _MIXTRAL_PARTS}.get(name, _LLAMA_PARTS)
    unlike = [(key, getattr(model, key), f"has {want}") for key, want in parts.items()]
    unlike = [(key, value, why) for key, value, why in unlike if value != parts[key]]
    if name == GPT2:
        if model.num_experts:
            unlike.append(("num_experts", model.num_experts, "has none"))
        if model.activation not in _GPT2_ACTIVATIONS:
            unlike.append(("activation", model.activation, f"has {' or '.join(_GPT2_ACTIVATIONS)}"))
        if model.num_kv_heads != model.num_heads:
            unlike.append(("num_kv_heads", model.num_kv_heads, f"has as many as heads, {model.num_heads}"))
        if model.query_size != model.hidden_size:
            unlike.append(("head_dim", model.head_size, "has hidden_size / num_heads"))
    elif model.hidden_size % model.num_heads:
        unlike.append(("num_heads", model.num_heads, f"divides hidden_size={model.hidden_size}"))
    problems = [
        Problem(
            "export-no-hf-form", f"has no Hugging Face form: {name} {why}", path=f"model.{key}", value=value
        )
        for key, value, why in unlike
    ]
    if problems:
        raise UserError(*problems)
    return name


def build_hf_config(model: DecoderModel, seq_len: int, end_token: int, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        model: One that has a Hugging Face form.
        seq_len: Maximum number of positions, if the model names none.
        end_token: End-of-document token, also used as the first token.
        dtype: Dtype of the exported weights.
    """
    common = {
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "dtype": dtype,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab_size,
    }
    if architecture_of(model) == GPT2:
        return {"architectures": [GPT2], "model_type": "gpt2", **common, **_gpt2_fields(model)}
    name, kind = architecture_of(model), "llama"
    fields = _llama_fields(model, seq_len)
    if name == MIXTRAL:
        kind, fields = "mixtral", fields | _mixtral_fields(model)
    return {"architectures": [name], "model_type": kind, **common, **fields}


def to_json_bytes(content: dict[str, Any]) -> bytes:
    """The content of a JSON file of the folder."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _llama_fields(model: DecoderModel, seq_len: int) -> dict[str, Any]:
    """RoPE settings in the older form, which every version of transformers reads; the newer form needs v5."""
    scaling = None
    if model.rope_factor is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": model.rope_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_positions,
        }
    return {
        "attention_bias": model.attention_bias,
        "attention_dropout": 0.0,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.max_positions or seq_len,
        "mlp_bias": model.ffn_bias,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_scaling": scaling,
        "rope_theta": model.rope_theta,
    }


def _mixtral_fields(model: DecoderModel) -> dict[str, Any]:
    """The fields of Mixtral that Llama does not have."""
    return {
        "intermediate_size": model.expert_width,
        "num_experts_per_tok": model.experts_per_token,
        "num_local_experts": model.num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _gpt2_fields(model: DecoderModel) -> dict[str, Any]:
    return {
        "activation_function": _GPT2_ACTIVATIONS[model.activation],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "layer_norm_epsilon": model.norm_eps,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_size,
        "n_layer": model.num_layers,
        "n_positions": model.max_positions,
        "resid_pdrop": 0.0,
    }
