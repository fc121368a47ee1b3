"""Which module of a decoder is split how over the ranks that share its matrices (``layout.tp``).

``parallel/tensor.py`` says what each style does. A module that is not here is whole on every rank.
"""

from __future__ import annotations

from typing import Literal

Style = Literal["prepare_input", "colwise", "colwise_kv", "rowwise", "vocab", "positions"]

SHARDING: dict[str, Style] = {
    "embed": "vocab",
    "positions": "positions",
    "blocks.*.attention": "prepare_input",
    "blocks.*.attention.wq": "colwise",
    "blocks.*.attention.wk": "colwise_kv",
    "blocks.*.attention.wv": "colwise_kv",
    "blocks.*.attention.wo": "rowwise",
    "blocks.*.ffn": "prepare_input",
    "blocks.*.ffn.gate": "colwise",
    "blocks.*.ffn.up": "colwise",
    "blocks.*.ffn.down": "rowwise",
    "blocks.*.ffn.shared": "prepare_input",
    "blocks.*.ffn.shared.gate": "colwise",
    "blocks.*.ffn.shared.up": "colwise",
    "blocks.*.ffn.shared.down": "rowwise",
    "head": "vocab",
}
"""Modules by name; ``*`` stands for the number of a block."""


def style_of(module: str) -> Style | None:
    """The style of a module; None if it is whole."""
    parts = ["*" if part.isdigit() else part for part in module.split(".")]
    return SHARDING.get(".".join(parts))
