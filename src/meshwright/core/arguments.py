"""Accepts one value or a sequence for arguments of the public API; a string is one value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

Item = TypeVar("Item")


def as_list(value: Item | Sequence[Item]) -> list[Item]:
    """The values of an argument; one text, path or number is a list of one."""
    if isinstance(value, str | Path | int):
        return [cast(Item, value)]
    return list(cast(Sequence[Item], value))
