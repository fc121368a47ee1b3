"""Outputs and pictures that the README and the docs quote are what the commands print and draw today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
REGENERATE = "regenerate: make docs-figures"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_figures", ROOT / "benchmarks" / "docs_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = load_script()
QUOTES = [
    pytest.param(
        match[0],
        id=f"{page.name}: {match['command']} {match['part'] or ''}",
        marks=[] if " job.toml" in match["command"] else pytest.mark.slow,
    )
    for page in FIGURES.PAGES
    for match in FIGURES.QUOTED.finditer(page.read_text())
]


@pytest.mark.parametrize("block", QUOTES)
def test_quoted_outputs_are_what_the_commands_print(block: str) -> None:
    assert FIGURES.rewrite(block, keep_times=True) == block, REGENERATE


DRAWINGS = [name for name in FIGURES.PICTURES if name.endswith(".svg")]


@pytest.mark.parametrize("name", DRAWINGS)
def test_pictures_are_what_the_commands_draw(name: str, tmp_path: Path) -> None:
    assert FIGURES.draw(name, tmp_path).read_text() == (FIGURES.FIGURES / name).read_text(), REGENERATE


def test_a_quote_that_no_longer_holds_is_rewritten() -> None:
    """The check can fail: another number in a block is replaced."""
    block = QUOTES[0].values[0]
    assert FIGURES.rewrite(block.replace("fits", "fails"), keep_times=True) == block


def test_every_plan_that_is_shown_comes_from_the_script() -> None:
    """A console block with a plan below no comment could become stale."""
    for page in FIGURES.PAGES:
        rest = FIGURES.QUOTED.sub("", page.read_text())
        assert "```console\n$ meshwright plan" not in rest, page.name
        assert "```console\n$ meshwright schedule" not in rest, page.name
