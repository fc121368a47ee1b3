"""Arguments of the public API that are one value or several: a text is one value, not its letters."""

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
