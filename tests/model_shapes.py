"""Shapes of models that several tests share."""

from __future__ import annotations

from typing import Any

GPT_PARTS: dict[str, Any] = {
    "positions": "learned",
    "norm": "layer",
    "activation": "gelu_tanh",
    "attention_bias": True,
    "ffn_bias": True,
}
"""Model keys of a GPT-2-like decoder, without ``max_positions``, which depends on the sequence length."""


def gpt_overrides(max_positions: int) -> list[str]:
    """The keys as command-line overrides."""
    parts = {**GPT_PARTS, "max_positions": max_positions}
    return [f"model.{key}={str(value).lower()}" for key, value in parts.items()]


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
HF_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 64}),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4, "rope_theta": 5e5}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}
"""Class and config of a small model of each supported Hugging Face family, without ``vocab_size``."""

LLAMA_ON_16_GPUS: dict[str, dict[str, Any]] = {
    "model": {"preset": "llama3-8b"},
    "cluster": {"nodes": 2},
    "train": {"global_batch": 32, "precision": "bf16"},
    "data": {"seq_len": 2048},
}
"""Tables of a job that needs sharding."""
