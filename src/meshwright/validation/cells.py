"""Typed access to the cells of one published run; every default for a blank cell is recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping

LARGEST = 10**8
"""Largest count that a cell may hold; larger numbers are typing errors."""
MAY_BE_ZERO = ("zero_stage", "shared_experts", "dense_layers")
YES, NO = ("y", "yes", "true", "1", "on"), ("n", "no", "false", "0", "off")
OFFLOADED_ACTIVATIONS = re.compile(
    r"(?<!no )(?<!without )(offload\w* (of |all )?activations?|activations? (are |is )?offload\w*)"
)
"""A note that says that activations wait on the CPU."""
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
BLANK = ("-", "--", "\N{EN DASH}", "\N{EM DASH}", "/", "?", "n/a", "na", "n.a.", "tbd", "unknown")
"""What tables write for a value that is not published; read as a blank cell."""
OUT_OF_MEMORY = re.compile(r"(cuda )?(oom\b|out[ -]of[ -]memory)")
"""What tables write for a layout that ran out of memory, also in the place of a measurement."""
UNITS: dict[str, dict[str, float]] = {
    "params_b": {"b": 1.0, "m": 1e-3, "t": 1e3},
    "seq_len": {"k": 1024.0, "m": 2.0**20},
    "step_time_s": {"s": 1.0, "sec": 1.0, "ms": 1e-3, "min": 60.0},
    "tokens_per_s_per_gpu": {"k": 1e3},
    "memory_gb_per_gpu": {"gb": 1.0, "g": 1.0, "gib": 2.0**30 / 1e9, "mb": 1e-3, "mib": 2.0**20 / 1e9},
}
"""Units that a cell may state, and their size in the column's own unit."""
ZERO_STAGES = {"ddp": 0, "none": 0, "distributed optimizer": 1, "fsdp": 3, "fsdp1": 3, "fsdp2": 3}
"""Names of ZeRO stages."""
_NEGATION = re.compile(
    r"(?:\b(?:no|not|non|without|w/o|never|neither|nor)[ -](?:any |a |the |use of |use |using )?"
    r"(?:[\w.-]+ (?:or|nor) )?|\bun-?)$"
)
"""What stands before something that a row did not have: `without using`, `no Liger or`."""
_OFF = re.compile(
    r"\w*(?: kernels?| and [\w ]+)?\s*[:=]?\s*(?:is |are |was )?"
    r"(?:off|false|disabled|unused|none|n/a|unknown|failed|(?<=[:=] )no|"
    r"not (?:used|stated|given|known|published))\b"
)
"""What stands after it: `disabled`, `=False`, `is not stated`."""
_ZERO_STAGE = re.compile(r"(?:zero|stage|zero[ -]stage)[ -]?([0-3])")
_WITH_UNIT = re.compile(r"([\d.,]+(?:e[+-]?\d+)?)\s*([a-z]+)", re.IGNORECASE)


class NotExpressedError(Exception):
    """A row lacks a value without a default, or is inconsistent; the message is the reason."""


class Cells:
    """One row."""

    def __init__(self, number: int, cells: Mapping[str, object]) -> None:
        self.number, self.cells = number, cells
        self.filled: list[str] = []

    def text(self, name: str) -> str:
        """A cell as stripped text; empty if missing or if it says that there is no value."""
        value = self.cells.get(name)
        text = value.strip() if isinstance(value, str) else ""
        return "" if text.lower() in BLANK or OUT_OF_MEMORY.match(text.lower()) else text

    def cell_error(self, name: str, rule: str) -> NotExpressedError:
        """The error for a cell that cannot be read."""
        return NotExpressedError(f"bad cell in line {self.number}, column {name}: {self.text(name)!r} {rule}")

    def number_of(self, name: str) -> float | None:
        """A cell with a positive number; None if blank."""
        text, size = self._split_unit(name)
        if not text:
            return None
        if _THOUSANDS.fullmatch(text):
            text = text.replace(",", "")
        try:
            value = float(text) * size
        except ValueError:
            raise self.cell_error(name, "is not a number") from None
        if value == 0 and name in MAY_BE_ZERO:
            return value
        if not 0 < value < float("inf"):
            raise self.cell_error(name, "is not a positive number")
        return value

    def _split_unit(self, name: str) -> tuple[str, float]:
        """A cell without its unit, and the unit's size in the column's own unit."""
        text = self.text(name)
        found = _WITH_UNIT.fullmatch(text)
        size = UNITS.get(name, {}).get(found[2].lower()) if found else None
        return (text, 1.0) if found is None or size is None else (found[1], size)

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

    def zero_stage(self) -> int | None:
        """The ZeRO stage, also as `ZeRO-3`, `stage 3`, `FSDP` or `DDP`; None if blank."""
        text = self.text("zero_stage").lower()
        if text in ZERO_STAGES:
            return ZERO_STAGES[text]
        found = _ZERO_STAGE.fullmatch(text)
        return int(found[1]) if found else self.optional("zero_stage")

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

    def says(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Where the note first says something, unless it says that the row did not have it."""
        return find_stated(pattern, self.note)

    @property
    def note(self) -> str:
        """The row's note in lower case."""
        return self.text("note").lower()


def find_stated(pattern: str | re.Pattern[str], text: str) -> re.Match[str] | None:
    """The first match without a negation before or after it: `liger` is not in `no Liger` or `Liger: off`."""
    for found in re.finditer(pattern, text):
        if not _NEGATION.search(text[: found.start()]) and not _OFF.match(text[found.end() :]):
            return found
    return None
