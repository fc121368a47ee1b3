"""Which module of a decoder is split how over the ranks that share its matrices (``layout.tp``).

``parallel/tensor.py`` says what each style does. A module that is not here is whole on every rank.
"""

from __future__ import annotations

from typing import Literal

Style = Literal["enter", "column", "keys", "row", "vocabulary", "positions"]

SHARDING: dict[str, Style] = {
    "embed": "vocabulary",
    "positions": "positions",
    "blocks.*.attention": "enter",
    "blocks.*.attention.wq": "column",
    "blocks.*.attention.wk": "keys",
    "blocks.*.attention.wv": "keys",
    "blocks.*.attention.wo": "row",
    "blocks.*.ffn": "enter",
    "blocks.*.ffn.gate": "column",
    "blocks.*.ffn.up": "column",
    "blocks.*.ffn.down": "row",
    "blocks.*.ffn.shared": "enter",
    "blocks.*.ffn.shared.gate": "column",
    "blocks.*.ffn.shared.up": "column",
    "blocks.*.ffn.shared.down": "row",
    "head": "vocabulary",
}
"""Modules by name; ``*`` stands for the number of a block."""


def style_of(module: str) -> Style | None:
    """The style of a module; None if it is whole."""
    parts = ["*" if part.isdigit() else part for part in module.split(".")]
    return SHARDING.get(".".join(parts))
