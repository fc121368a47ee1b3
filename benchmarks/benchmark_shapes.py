"""Models and batches that ``one_device.py`` trains, by name."""

from __future__ import annotations

from typing import Any

_LLAMA = {"tied_embeddings": False}
_EXPERTS = {**_LLAMA, "num_layers": 16, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 16,
            "ffn_size": 2048, "vocab_size": 32000, "num_experts": 16, "experts_per_token": 2}  # fmt: skip
_LARGE_VOCABULARY = {"tied_embeddings": True, "num_layers": 36, "hidden_size": 2048, "num_heads": 16,
                     "num_kv_heads": 2, "ffn_size": 11008, "vocab_size": 151936}  # fmt: skip
_GPT2_XL = {"num_layers": 48, "hidden_size": 1600, "num_heads": 25, "num_kv_heads": 25, "ffn_size": 6400,
            "vocab_size": 50304, "tied_embeddings": True, "positions": "learned", "max_positions": 1024,
            "norm": "layer", "activation": "gelu", "attention_bias": True, "ffn_bias": True}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "a": {"num_layers": 16, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192,
          "vocab_size": 128256, "rope_theta": 500000.0},
    "b": {"num_layers": 28, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_size": 8192,
          "vocab_size": 128256, "rope_theta": 500000.0},
    "experts": _EXPERTS,
    "many-experts": {**_EXPERTS, "num_layers": 8, "num_experts": 64, "experts_per_token": 6,
                     "expert_ffn_size": 1408, "shared_experts": 1},
    "gpt2-xl": _GPT2_XL,
    "large-vocabulary": _LARGE_VOCABULARY,
    "wide": {**_LLAMA, "num_layers": 8, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
             "ffn_size": 14336, "vocab_size": 128256},
    "narrow": {"tied_embeddings": True, "num_layers": 24, "hidden_size": 896, "num_heads": 14,
               "num_kv_heads": 2, "ffn_size": 4864, "vocab_size": 151936},
}  # fmt: skip
BATCHES = {
    "a": (8, 4096),
    "b": (4, 4096),
    "experts": (4, 4096),
    "many-experts": (4, 4096),
    "gpt2-xl": (16, 1024),
    "large-vocabulary": (4, 4096),
    "wide": (2, 8192),
    "narrow": (8, 4096),
}
"""Sequences per step, and tokens of each."""
COMPARED = ("a", "b")
"""Shapes that plain torch, transformers and the floor can run, too. No rate of the planner was chosen on the
others; they run with the block backend that ``meshwright train`` chooses."""
SMALL = {
    "a": {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 256,
          "vocab_size": 512},
    "b": {"num_layers": 3, "hidden_size": 96, "num_heads": 12, "num_kv_heads": 4, "ffn_size": 256,
          "vocab_size": 512},
}  # fmt: skip
"""Small shapes for a CPU."""
SMALL_BATCHES = {"a": (4, 64), "b": (2, 64)}
