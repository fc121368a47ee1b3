"""A small job on a fixed cluster, so that no prediction depends on the machine that runs the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.spec.job import Job
from meshwright.spec.load import build_job


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Job]:
    """``make_job(layout={"dp_replicate": 2})``: the tiny model with tables laid over; jobs are built once."""
    made: dict[str, Job] = {}

    def make(**tables: Any) -> Job:
        if repr(tables) not in made:
            made[repr(tables)] = build(tables)
        return made[repr(tables)]

    def build(tables: dict[str, dict[str, Any]]) -> Job:
        tree: dict[str, Any] = {
            "name": "small",
            "model": {"preset": "tiny"},
            "cluster": {"preset": "h100-sxm"},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": 4, "global_batch": 8},
        }
        for name, keys in tables.items():
            tree[name] = {**tree.get(name, {}), **keys}
        return build_job(tree)

    return make
