"""Presets of models and clusters: one TOML file per preset."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from typing import Any, Literal

from meshwright.core.errors import Problem

Kind = Literal["models", "clusters"]


def preset_names(kind: Kind) -> list[str]:
    """All presets of a kind, sorted."""
    folder = resources.files(__package__) / kind
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def read_preset(kind: Kind, name: str) -> dict[str, Any] | Problem:
    """The fields of a preset, or the problem with its name."""
    names = preset_names(kind)
    section = kind.removesuffix("s")
    if name not in names:
        return Problem(
            code=f"{section}-unknown-preset",
            path=f"{section}.preset",
            value=name,
            rule=f"is not a {section} preset",
            fix=suggest_preset(kind, name),
        )
    return tomllib.loads((resources.files(__package__) / kind / f"{name}.toml").read_text())


def suggest_preset(kind: Kind, name: str) -> str:
    """Suggest presets for an unknown name: those that begin like it or are similar, or all of them."""
    names = preset_names(kind)
    near = [known for known in names if known.startswith(name.lower())]
    near.sort(key=lambda known: not known.endswith("-sxm"))  # the usual form of a GPU comes first
    near = near or difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Presets: {', '.join(names)}"
