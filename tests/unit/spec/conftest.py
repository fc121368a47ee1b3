"""A valid job as nested tables, and the problems of a job with changed tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.core.errors import Problem, UserError
from meshwright.spec.load import build_job

VALID: dict[str, Any] = {
    "name": "valid",
    "model": {"preset": "tiny"},
    "cluster": {"preset": "h100-sxm"},
    "data": {"path": "text", "seq_len": 32},
    "train": {"steps": 4, "global_batch": 8},
}


@pytest.fixture
def tree() -> Callable[..., dict[str, Any]]:
    """``tree(layout=..., data=None)`` is the valid job with keys added to tables; None removes a table."""

    def change(**tables: Any) -> dict[str, Any]:
        made = copy.deepcopy(VALID)
        for name, keys in tables.items():
            if keys is None:
                del made[name]
            elif isinstance(keys, dict) and isinstance(made.get(name), dict):
                made[name] |= keys
            else:
                made[name] = keys
        return made

    return change


@pytest.fixture
def refused(tree) -> Callable[..., list[Problem]]:
    """``refused(layout={"tp": 3})``: the problems of the changed job. It fails if the job is valid."""

    def problems(**tables: Any) -> list[Problem]:
        with pytest.raises(UserError) as caught:
            build_job(tree(**tables))
        return list(caught.value.problems)

    return problems
