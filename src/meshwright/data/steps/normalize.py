"""Normalises text: Unicode NFC, line feeds, no control characters, no spaces at the end of a line."""

from __future__ import annotations

import re
import unicodedata

_LINE_ENDS = re.compile(r"\r\n?|[\u0085\u2028\u2029]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
_TRAILING = re.compile(r"[ \t]+(?=\n)")


def normalize_text(text: str) -> str:
    """The normalised text. Unicode rules are those of this Python's ``unicodedata``."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = _LINE_ENDS.sub("\n", text)
    text = _CONTROL.sub("", text)
    return _TRAILING.sub("", text)
