"""The tensor parallel table of a decoder (``layout.tp``): module name to sharding style.

``parallel/tensor.py`` explains the styles. A module that is not in the table is replicated.
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
"""By module name; ``*`` is the index of a block."""


def style_of(module: str) -> Style | None:
    """The style of a module; None if it is replicated."""
    parts = ["*" if part.isdigit() else part for part in module.split(".")]
    return SHARDING.get(".".join(parts))
