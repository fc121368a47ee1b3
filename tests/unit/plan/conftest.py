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


@pytest.fixture
def make_h200_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    """``make_h200_job(layers=12, batch=4)``: a Llama 2048 wide, compiled on one H200, sequences of 4096."""

    def make(layers: int = 16, batch: int = 8) -> Job:
        sizes = {"hidden_size": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 8192}
        words = {"vocab_size": 128256, "tied_embeddings": False}
        return make_job(
            model={"preset": None, "num_layers": layers, **sizes, **words},
            cluster={"preset": "h200-sxm", "devices_per_node": 1},
            data={"seq_len": 4096},
            train={"global_batch": batch, "precision": "bf16", "compile": True, "residual": "bf16"},
            layout={"dp_replicate": 1, "micro_batch": batch, "recompute": "selective"},
        )

    return make
