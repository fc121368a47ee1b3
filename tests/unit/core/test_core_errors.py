"""A problem is one line that ends in its code; errors can be pickled."""

from __future__ import annotations

import inspect
import pickle

import pytest

from meshwright.core import errors
from meshwright.core.errors import (
    CheckFailedError,
    InterruptedRunError,
    MeshwrightError,
    Problem,
    RunFailedError,
    UserError,
    missing_package,
)

TREE = {UserError: 2, CheckFailedError: 3, RunFailedError: 4, InterruptedRunError: 130}


def test_a_problem_has_key_value_rule_fix_and_code_in_order():
    """The line has key and value, the rule with its numbers, the fix, and the code."""
    problem = Problem(
        code="layout-tp-heads",
        rule="does not divide model.num_heads=32; heads split evenly over tp",
        path="layout.tp",
        value=6,
        fix="Use 1, 2, 4, 8, 16 or 32",
    )
    assert str(problem) == (
        "layout.tp=6 does not divide model.num_heads=32; heads split evenly over tp. "
        "Use 1, 2, 4, 8, 16 or 32. [layout-tp-heads]"
    )


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem("a-b", "is wrong"), "is wrong. [a-b]"),
        (Problem("a-b", "is wrong."), "is wrong. [a-b]"),
        (Problem("a-b", "is wrong", path="x.y"), "x.y is wrong. [a-b]"),
        (Problem("a-b", "is wrong", path="x.y", value=0), "x.y=0 is wrong. [a-b]"),
        (Problem("a-b", "is wrong", path="x.y", value=False), "x.y=False is wrong. [a-b]"),
        (Problem("a-b", "is wrong", path="x.y", value="z"), "x.y='z' is wrong. [a-b]"),
        (Problem("a-b", "is wrong", value="z"), "is wrong. [a-b]"),
        (Problem("a-b", "is wrong", fix="Leave it."), "is wrong. Leave it. [a-b]"),
        (Problem("a-b", "is wrong", fix="Did you mean z?"), "is wrong. Did you mean z? [a-b]"),
    ],
)
def test_every_form_of_a_problem_ends_in_its_code_without_double_stops(problem, line):
    assert str(problem) == line


def test_a_json_problem_keeps_numbers_and_converts_other_values_to_text():
    plain = Problem("a-b", "is wrong", path="x", value=6, fix="Use 4").as_dict()
    assert plain == {
        "code": "a-b",
        "path": "x",
        "value": 6,
        "rule": "is wrong",
        "fix": "Use 4",
        "message": "x=6 is wrong. Use 4. [a-b]",
    }
    assert Problem("a-b", "is wrong", path="x", value=[1]).as_dict()["value"] == "[1]"


@pytest.mark.parametrize(("kind", "status"), TREE.items())
def test_each_error_class_has_its_documented_exit_status(kind, status):
    assert kind(Problem("a-b", "is wrong")).exit_status == status


def test_every_error_class_has_an_exit_status():
    found = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, MeshwrightError) and kind is not MeshwrightError
    }
    assert found == set(TREE)


@pytest.mark.parametrize("kind", TREE)
def test_an_error_pickles_with_all_its_problems(kind):
    """A rank sends its error to the supervisor as a pickle."""
    error = kind(Problem("a-b", "is wrong", path="x", value=1), Problem("c-d", "is wrong too"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.problems == error.problems
    assert str(again) == str(error) == "x=1 is wrong. [a-b]\nis wrong too. [c-d]"


def test_an_error_needs_at_least_one_problem():
    with pytest.raises(AssertionError, match="at least one problem"):
        UserError()


def test_a_missing_package_names_its_extra():
    (problem,) = missing_package("torch", "run", "training").problems
    assert problem.code == "install-missing-extra"
    assert "pip install 'meshwright[run]'" in problem.fix
    assert "'torch'" in problem.rule
    assert "training" in problem.rule
