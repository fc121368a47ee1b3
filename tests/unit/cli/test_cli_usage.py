"""Wrong command lines: one sentence of our own with a code, none of the parser's."""

from __future__ import annotations

import re

import pytest

PARSERS = re.compile(
    r"Input should|No such (command|option)|Invalid value|Missing (argument|option)|Got unexpected|Errno"
)


@pytest.mark.parametrize(
    ("arguments", "path", "fix"),
    [
        (["plam"], "plam", "meshwright plan?"),
        (["foo"], "foo", "validate"),
        (["checkpoint"], "meshwright checkpoint", "export"),
        (["checkpoint", "lst"], "lst", "checkpoint list?"),
        (["checkpoint", "list", "a", "b"], "b", "--help"),
        (["plan"], "JOB", "--help"),
        (["checkpoint", "export", "a"], "OUT", "--help"),
        (["plan", "tiny", "--top"], "--top", "--help"),
        (["plan", "tiny", "--pictur", "x"], "--pictur", "--picture?"),
        (["plan", "tiny", "-z"], "-z", "--help"),
    ],
)
def test_a_wrong_command_line_names_what_is_wrong_and_a_fix(cli, arguments, path, fix):
    ran = cli(*arguments)
    assert (ran.status, ran.codes) == (2, ["cli-usage"])
    assert not PARSERS.search(ran.err)
    line = ran.err.splitlines()[-1]
    assert line.startswith(f"error: {path} ")
    assert fix in line


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["plan", "tiny", "--top", "many"], "must be a whole number"),
        (["plan", "tiny", "--top", "0"], "must be at least 1"),
        (["generate", "x", "--temperature", "hot"], "must be a number"),
        (["generate", "x", "--temperature", "200"], "must be at most 100"),
        (["plan", "tiny", "--by", "speed"], "must be one of time, cost, memory"),
        (["checkpoint", "prune", "a", "--keep", "0"], "must be at least 1"),
    ],
)
def test_a_bad_value_of_an_option_gets_its_rule(cli, arguments, rule):
    ran = cli(*arguments, "--json")
    assert (ran.status, ran.codes) == (2, ["cli-usage"])
    assert ran.json["errors"][0]["rule"] == rule


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "tiny", "-o", "/nonexist/x.toml"], "plan-not-writable"),
        (["plan", "tiny", "--picture", "/nonexist/x.svg"], "picture-not-written"),
    ],
)
def test_a_file_that_cannot_be_written_is_named_without_the_draft(cli, arguments, code):
    ran = cli(*arguments)
    assert (ran.status, ran.codes) == (2, [code])
    assert not PARSERS.search(ran.err)
    assert ".part" not in ran.err
