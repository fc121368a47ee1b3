"""A job that is right in everything, and a way to make it wrong in one thing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.core.errors import Problem, UserError
from meshwright.spec.load import build_job

GOOD: dict[str, Any] = {
    "name": "good",
    "model": {"preset": "tiny"},
    "cluster": {"preset": "h100-sxm"},
    "data": {"path": "text", "seq_len": 32},
    "train": {"steps": 4, "global_batch": 8},
}


@pytest.fixture
def tree() -> Callable[..., dict[str, Any]]:
    """``tree(layout={"tp": 2}, data=None)``: the good job with tables laid over it, or taken away."""

    def change(**tables: Any) -> dict[str, Any]:
        made = copy.deepcopy(GOOD)
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
    """The problems of the good job with tables laid over it; fails if there are none."""

    def problems(**tables: Any) -> list[Problem]:
        with pytest.raises(UserError) as caught:
            build_job(tree(**tables))
        return list(caught.value.problems)

    return problems
