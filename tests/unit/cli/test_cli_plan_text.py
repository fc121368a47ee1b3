"""Text of a plan: counts of the search, and formulas that fit a table."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.cli.output import Output
from meshwright.cli.plan_text import FORMULA_WIDTH, count_search, shorten_formula
from meshwright.cli.reporter import ConsoleReporter
from meshwright.plan.search.planner import search_job
from meshwright.spec.load import load_job


@pytest.fixture
def found(good: str):
    return search_job(load_job(good), top=4)


def test_the_search_line_counts_evaluated_pruned_and_checked_layouts(found):
    words = count_search(found)
    assert f"{found.evaluated:,} layouts evaluated in" in words
    assert f"{found.pruned:,} pruned by lower bounds of memory and time" in words
    assert f"{found.may_fit:,} may fit by these bounds" in words
    assert words.endswith("4 checked exactly, 4 of them fit")


def test_a_search_that_stopped_early_counts_unseen_layouts(found):
    early = dataclasses.replace(found, stopped_early=True, unseen=12_345)
    assert count_search(early).endswith("stopped at the time limit, 12,345 layouts not evaluated")


def test_long_formulas_are_shortened():
    assert shorten_formula("4 x 1.23456 [layers]") == "4 x 1.234 [layers]"
    cut = shorten_formula("2 x 3 [bytes] + " * 20)
    assert len(cut) <= FORMULA_WIDTH
    assert cut.endswith(" ...")


def test_without_a_terminal_there_is_no_progress_bar(capfd):
    with ConsoleReporter(Output(as_json=True)).search() as progress:
        assert progress(10**6, 10**7) is None
    assert capfd.readouterr() == ("", "")
