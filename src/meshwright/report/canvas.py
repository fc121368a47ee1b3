"""Two surfaces to draw on alike: SVG for browsers, PNG where a picture must be pixels. No library is needed.

Places are pixels from the top left corner. A PNG has two of its own for each, and letters of 5 x 7 dots.
"""

from __future__ import annotations

import struct
import zlib
from html import escape
from typing import Literal, Protocol

import numpy as np

from meshwright.report.glyphs import GLYPH_COLUMNS, GLYPH_ROWS, glyph

Anchor = Literal["start", "middle", "end"]
SCALE = 2
"""Pixels of a PNG for one of the picture."""
ADVANCE = 6.2
"""Width of a letter, about: for placing words."""
FONT = "12px ui-monospace, Menlo, Consolas, monospace"


class Canvas(Protocol):
    """What can be drawn."""

    def rect(self, x: float, y: float, width: float, height: float, colour: str, says: str = "") -> None:
        """A filled box; ``says`` is shown when pointed at, where there is pointing."""

    def line(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1
    ) -> None:
        """A straight line, across or down."""

    def text(self, x: float, y: float, words: str, anchor: Anchor = "start", colour: str = "#16191d") -> None:
        """Words on a base line."""

    def finish(self) -> bytes:
        """The file."""


class SvgCanvas:
    """Draws elements."""

    def __init__(self, width: int, height: int, title: str) -> None:
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">',
            f'<style>text {{ font: {FONT}; }}</style><rect width="100%" height="100%" fill="#ffffff"/>',
        ]

    def rect(self, x: float, y: float, width: float, height: float, colour: str, says: str = "") -> None:
        """A filled box."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        inside = f"<title>{escape(says)}</title>" if says else ""
        self._parts.append(f'<rect {place} fill="{colour}">{inside}</rect>')

    def line(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1
    ) -> None:
        """A straight line."""
        place = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        self._parts.append(f'<line {place} stroke="{colour}" stroke-width="{width}"/>')

    def text(self, x: float, y: float, words: str, anchor: Anchor = "start", colour: str = "#16191d") -> None:
        """Words."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
        self._parts.append(f"<text {place}>{escape(words)}</text>")

    def finish(self) -> bytes:
        """The file."""
        return ("\n".join([*self._parts, "</svg>"]) + "\n").encode()


class PngCanvas:
    """Draws pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._pixels = np.full((height * SCALE, width * SCALE, 3), 255, dtype=np.uint8)
        self._title = title

    def rect(self, x: float, y: float, width: float, height: float, colour: str, says: str = "") -> None:
        """A filled box."""
        left, top = round(x * SCALE), round(y * SCALE)
        right, bottom = max(left + 1, round((x + width) * SCALE)), max(top + 1, round((y + height) * SCALE))
        self._pixels[max(top, 0) : bottom, max(left, 0) : right] = _channels(colour)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1
    ) -> None:
        """A straight line, across or down."""
        (x1, y1), (x2, y2) = start, end
        across = abs(x2 - x1) >= abs(y2 - y1)
        more = (0.0, width) if across else (width, 0.0)
        self.rect(min(x1, x2), min(y1, y2), abs(x2 - x1) + more[0], abs(y2 - y1) + more[1], colour)

    def text(self, x: float, y: float, words: str, anchor: Anchor = "start", colour: str = "#16191d") -> None:
        """Words, in letters of 5 x 7 dots."""
        advance = (GLYPH_COLUMNS + 1) * SCALE
        left = round(x * SCALE) - {"start": 0, "middle": 1, "end": 2}[anchor] * len(words) * advance // 2
        top = round(y * SCALE) - (GLYPH_ROWS - 1) * SCALE
        ink = _channels(colour)
        for letter in words:
            dots = np.kron(glyph(letter), np.ones((SCALE, SCALE), dtype=np.bool_))
            if top >= 0 and left >= 0:
                area = self._pixels[top : top + dots.shape[0], left : left + dots.shape[1]]
                area[dots[: area.shape[0], : area.shape[1]]] = ink
            left += advance

    def finish(self) -> bytes:
        """The file: one image chunk, every row unfiltered, and the title."""
        height, width, _ = self._pixels.shape
        rows = np.zeros((height, 1 + width * 3), dtype=np.uint8)
        rows[:, 1:] = self._pixels.reshape(height, width * 3)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        title = b"Title\0" + self._title.encode("latin-1", "replace")
        chunks = (
            (b"IHDR", header),
            (b"tEXt", title),
            (b"IDAT", zlib.compress(rows.tobytes(), 9)),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
