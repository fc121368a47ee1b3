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
"""What makes a decoder one of GPT's kind; ``max_positions`` belongs to the length of the samples."""


def gpt_overrides(max_positions: int) -> list[str]:
    """The same for the command line."""
    parts = {**GPT_PARTS, "max_positions": max_positions}
    return [f"model.{key}={str(value).lower()}" for key, value in parts.items()]
