"""Typed access to the cells of one published run; every default for a blank cell is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping

LARGEST = 10**8
"""Largest count that a cell may hold; larger numbers are typing errors."""
MAY_BE_ZERO = ("zero_stage", "shared_experts", "dense_layers")
YES, NO = ("y", "yes", "true", "1", "on"), ("n", "no", "false", "0", "off")
OFFLOADED_ACTIVATIONS = re.compile(
    r"(?<!no )(?<!without )(offload\w* (of )?activations?|activations? (are |is )?offload\w*)"
)
"""A note that says that activations wait on the CPU."""
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


class NotExpressedError(Exception):
    """A row lacks a value without a default, or is inconsistent; the message is the reason."""


class Cells:
    """One row."""

    def __init__(self, number: int, cells: Mapping[str, object]) -> None:
        self.number, self.cells = number, cells
        self.filled: list[str] = []

    def text(self, name: str) -> str:
        """A cell as stripped text; empty if missing."""
        value = self.cells.get(name)
        return value.strip() if isinstance(value, str) else ""

    def cell_error(self, name: str, rule: str) -> NotExpressedError:
        """The error for a cell that cannot be read."""
        return NotExpressedError(f"bad cell in line {self.number}, column {name}: {self.text(name)!r} {rule}")

    def number_of(self, name: str) -> float | None:
        """A cell with a positive number; None if blank."""
        text = self.text(name)
        if not text:
            return None
        if _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        try:
            value = float(text)
        except ValueError:
            raise self.cell_error(name, "is not a number") from None
        if value == 0 and name in MAY_BE_ZERO:
            return value
        if not 0 < value < float("inf"):
            raise self.cell_error(name, "is not a positive number")
        return value

    def optional(self, name: str) -> int | None:
        """A cell with an integer; None if blank."""
        value = self.number_of(name)
        if value is not None and value != int(value):
            raise self.cell_error(name, "is not a whole number")
        if value is not None and value > LARGEST:
            raise self.cell_error(name, f"is more than {LARGEST}")
        return None if value is None else int(value)

    def count(self, name: str) -> int:
        """A cell with an integer that has no default."""
        value = self.optional(name)
        if value is None:
            raise NotExpressedError(f"{name} not published")
        return value

    def count_or(self, name: str, default: int, why: str = "") -> int:
        """A cell with an integer, or its default."""
        value = self.optional(name)
        if value is None:
            self.fill(name, default, why)
            return default
        return value

    def flag(self, name: str) -> bool | None:
        """A cell with yes or no; None if blank."""
        text = self.text(name).lower()
        if text not in ("", *YES, *NO):
            raise self.cell_error(name, "is neither y nor n")
        return None if not text else text in YES

    def fill(self, name: str, value: object, why: str = "") -> None:
        """Record the default of a blank cell."""
        self.filled.append(f"assumed {name}={value}" + (f" ({why})" if why else ""))

    def remark(self, text: str) -> None:
        """Record how something was interpreted."""
        self.filled.append(text)

    @property
    def note(self) -> str:
        """The row's note in lower case."""
        return self.text("note").lower()
