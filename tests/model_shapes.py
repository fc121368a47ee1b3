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
