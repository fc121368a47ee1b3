"""Numbers and choices as error messages name them."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def near_divisors(number: int, wanted: int) -> list[int]:
    """The largest few divisors that are at most twice what was wanted."""
    return [d for d in range(1, min(number, 2 * wanted) + 1) if number % d == 0][-4:]


def list_choices(choices: Iterable[int | str]) -> str:
    """``1, 2 or 4``."""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last
