"""Figures through matplotlib: one style, and files as SVG, PNG or PDF.

matplotlib is the extra ``plots``. It is imported when a figure is drawn, through its object API: no pyplot,
no global state. Output is deterministic: no dates, fixed ids, and text stays text in SVG.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.core.packages import has_package, require_packages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
PIXELS_PER_INCH = 96
PNG_DPI = 192
INK = "#3b4048"
"""Text, ticks and frames. In a page it becomes the page's own text colour."""
COLORS = (
    "#2f76c9", "#d0700f", "#2f9160", "#9b51b8", "#b5891f", "#7d8590",
    "#c2405c", "#2d9da6", "#7a8f2a", "#5a60b4", "#b06a97", "#8a6d3b",
)  # fmt: skip
"""Series colours with enough contrast on white and on dark pages."""
NO_METADATA: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "meshwright",
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return has_package("matplotlib")


def require_picture(path: Path) -> None:
    """Check early that a picture can be drawn into this file.

    Raises:
        UserError: The suffix is not a picture's, matplotlib is missing, or the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        rule, fix = f"is not a picture: {', '.join(SUFFIXES)}", f"Use {path.with_suffix('.svg')}"
        raise UserError(Problem("picture-kind", rule, path=str(path), fix=fix))
    require_packages(("matplotlib", "plots"), needed_for="drawing a picture")
    if not can_write(path):
        rule, fix = "cannot be written", "Choose another file"
        raise UserError(Problem("picture-not-written", rule, path=str(path), fix=fix))


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Apply the style inside; matplotlib's settings are as before afterwards."""
    require_packages(("matplotlib", "plots"), needed_for="drawing a picture")
    import matplotlib  # noqa: PLC0415  (an extra)

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in pixels. Call inside :func:`style`."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(width / PIXELS_PER_INCH, height / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH)


def add_axes(figure: Figure, left: float, top: float, right: float, bottom: float) -> Axes:
    """Axes with these margins to the figure's edges, in pixels."""
    width, height = figure.get_size_inches() * PIXELS_PER_INCH
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure.add_axes(box)


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure; the suffix chooses the format.

    Raises:
        UserError: The suffix is not a picture's, or the file cannot be written.
    """
    require_picture(path)
    kind = path.suffix.lower().removeprefix(".")
    content = io.BytesIO()
    with style():
        figure.savefig(
            content, format=kind, dpi=PNG_DPI if kind == "png" else "figure", metadata=NO_METADATA[kind]
        )
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Choose another file"
        raise UserError(Problem("picture-not-written", rule, path=str(path), fix=fix)) from None


def embedded_svg(figure: Figure, label: str) -> str:
    """The figure as an ``<svg>`` element for a page: transparent, in the page's text colour."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    text = io.StringIO()
    with style():
        figure.savefig(text, format="svg", metadata=NO_METADATA["svg"])
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)  # several figures share a page
    drawn = drawn.replace(INK, "currentColor")
    return drawn.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
