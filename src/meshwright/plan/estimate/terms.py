"""Bytes as sums of products on columns, which can also be printed as formulas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.plan.estimate.grid import Floats

Factor = npt.NDArray[Any] | float
"""A number for all layouts, or a column; a flag counts as 0 or 1."""


def _multiply(factors: Iterable[Factor]) -> Floats | float:
    """The product; numbers first, so that each column is read once."""
    number, columns = 1.0, []
    for factor in factors:
        if isinstance(factor, float):
            number *= factor
        else:
            columns.append(factor)
    product: Any = number
    for column in columns:
        product = column * product
    return product  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Term:
    """A product of factors over a divisor, with a label."""

    label: str
    factors: tuple[Factor, ...]
    over: Factor = 1.0

    @cached_property
    def bytes(self) -> Floats | float:
        """The product."""
        product = _multiply(self.factors)
        return product if isinstance(self.over, float) and self.over == 1.0 else product / self.over

    def times(self, *factors: Factor) -> Term:
        """The same times more factors."""
        return Term(self.label, (*factors, *self.factors), self.over)

    def formula(self, index: int) -> str:
        """The formula of one layout; factors of 1 are left out."""
        numbers = [_at(factor, index) for factor in self.factors]
        text = " x ".join(_write(n) for n in numbers if n != 1.0) or "1"
        divisor = _at(self.over, index)
        return f"{text} / {_write(divisor)} [{self.label}]" if divisor != 1.0 else f"{text} [{self.label}]"


@dataclass(frozen=True)
class Sum:
    """A sum of terms and other sums, times factors; evaluated once."""

    parts: tuple[Term | Sum, ...] = ()
    factors: tuple[Factor, ...] = ()

    @classmethod
    def of(cls, *parts: Term | Sum) -> Sum:
        """A sum without the terms that are zero in every layout."""
        return cls(tuple(p for p in parts if isinstance(p, Sum) or not any(_is_zero(f) for f in p.factors)))

    def __add__(self, other: Sum) -> Sum:
        return Sum((self, other)) if self.parts and other.parts else (self if self.parts else other)

    def times(self, *factors: Factor) -> Sum:
        """The same times more factors."""
        return Sum((self,), factors) if self.parts else self

    @cached_property
    def bytes(self) -> Floats | float:
        """The sum."""
        total: Any = 0.0
        for part in self.parts:
            total = total + part.bytes if not _is_zero(total) else part.bytes
        return _multiply((*self.factors, total)) if self.factors else total

    def terms(self) -> Iterator[Term]:
        """All terms, multiplied by the factors of the sums that contain them."""
        for part in self.parts:
            for term in part.terms() if isinstance(part, Sum) else (part,):
                yield term.times(*self.factors) if self.factors else term

    def formula(self, index: int) -> str:
        """The formula of one layout: its terms that are not zero."""
        found = [term.formula(index) for term in self.terms() if _at(term.bytes, index) != 0.0]
        return " + ".join(found) or "0"


def _is_zero(value: Factor) -> bool:
    return isinstance(value, float) and value == 0.0


def _at(value: Factor, index: int) -> float:
    return float(np.asarray(value).reshape(-1)[index if np.ndim(value) else 0])


def _write(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)
