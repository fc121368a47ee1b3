"""``meshwright plan --picture``."""

from __future__ import annotations
from pathlib import Path
from typing import Any


def check_picture(path: Path) -> None:
    """x"""


def draw_picture(outcome: Any, path: Path) -> None:
    """x"""
