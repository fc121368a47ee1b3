"""Divisors, and choices as error messages list them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in reversed(small) if d * d != number)]


def near_divisors(number: int, wanted: int) -> list[int]:
    """The four largest divisors that are at most twice the wanted number."""
    return [d for d in range(1, min(number, 2 * wanted) + 1) if number % d == 0][-4:]


def list_choices(choices: Iterable[int | str]) -> str:
    """``1, 2 or 4``."""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last


def split_ranks(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every factorisation of a number of ranks into a number of degrees, in order."""
    if axes == 1:
        yield (world,)
        return
    for degree in divisors(world):
        for rest in split_ranks(world // degree, axes - 1):
            yield (degree, *rest)
