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
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        fix = f"Did you mean {near[0]!r}? " if near else ""
        return Problem(
            code=f"{section}-unknown-preset",
            path=f"{section}.preset",
            value=name,
            rule=f"is not a {section} preset",
            fix=f"{fix}There are {', '.join(names)}",
        )
    return tomllib.loads((resources.files(__package__) / kind / f"{name}.toml").read_text())
