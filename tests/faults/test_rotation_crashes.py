"""Fault test 19: a process that saves and rotates is killed at each of its system calls, by strace."""

from __future__ import annotations

import pytest

from meshwright.runs.faults.checks.rotation import CHANGES_NAMES, check_rotation


def kills(check) -> float:
    return next(figure.value for figure in check.figures if figure.name == "kills")


def test_a_crash_at_each_change_of_names_keeps_a_whole_checkpoint(check):
    check_rotation(check, CHANGES_NAMES)
    assert kills(check) > 10


@pytest.mark.slow
def test_a_crash_at_each_system_call_keeps_a_whole_checkpoint(check):
    check_rotation(check)
    assert kills(check) > 100
