"""Outputs and pictures that the README and the docs quote are what the commands print and draw today."""

from __future__ import annotations

import importlib.util
import re
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
QUICK = (" job.toml", " tiny", " validate", " my.csv", " schedule collective ")
SLOW_OPTION = "--leave-one-source-out"
QUOTES = [
    pytest.param(
        f"{FIGURES.files_of(page.read_text())}\n{match[0]}",
        id=f"{page.name}: {match['command']} {match['part'] or ''}",
        marks=[]
        if page == FIGURES.README
        or (any(word in match["command"] for word in QUICK) and SLOW_OPTION not in match["command"])
        else pytest.mark.slow,
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
    block = next(param.values[0] for param in QUOTES if not param.marks)
    assert " fits:" in block
    assert FIGURES.rewrite(block.replace(" fits:", " fails:"), keep_times=True) == block


@pytest.mark.parametrize("page", FIGURES.PAGES, ids=lambda page: page.name)
def test_every_quoted_output_can_be_regenerated_or_has_date_and_machine(page: Path) -> None:
    """Each console block is below a command that the script runs, or above a line with date and machine."""
    text = page.read_text()
    measured = list(FIGURES.MEASURED.finditer(text))
    assert all(FIGURES.STAMP.fullmatch(block[0].rpartition("\n")[2]) for block in measured)
    spans = [match.span() for match in (*FIGURES.QUOTED.finditer(text), *measured)]
    for block in re.finditer(r"^```(\w*)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE):
        if any(start <= block.start() < end for start, end in spans):
            continue
        if block[1] == "console":
            assert FIGURES.STAMP.match(text[block.end() :].lstrip("\n")), block[0]
        elif block[1] in ("", "text"):
            assert not re.search(r"^\$ |\[[a-z]+(-[a-z0-9]+)+\]$", block[2], re.MULTILINE), (
                f"an output is a console block: {block[0]}"
            )


def test_long_outputs_are_trimmed_to_first_and_last_steps_and_one_rank() -> None:
    lines = [f"step {n}/5  loss 5.0" for n in range(1, 6)]
    lines += [f"   {rank}  {kind} 1 1  equal" for rank in (0, 1, 2) for kind in ("parameters", "peak")]
    assert FIGURES.trim("\n".join([*lines, "ok"])).splitlines() == [
        "step 1/5  loss 5.0",
        "...",
        "step 5/5  loss 5.0",
        "   0  parameters 1 1  equal",
        "   0  peak 1 1  equal",
        "...",
        "ok",
    ]


@pytest.mark.slow
def test_measured_outputs_are_regenerated_with_date_and_machine() -> None:
    """The block of the page on checkpoints, run again: other times, the same lines."""
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    again = FIGURES.remeasure(page)
    before, after = (FIGURES.MEASURED.search(text)[0].splitlines() for text in (page, again))
    assert before[0] == after[0]
    assert FIGURES.STAMP.fullmatch(after[-1])
    assert len(before) == len(after)
    assert FIGURES.MEASURED.sub("", page) == FIGURES.MEASURED.sub("", again)
