"""Jobs for dense, MoE and latent-attention decoders on small clusters, built for planning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshwright.spec.job import Job
from meshwright.spec.load import build_job

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_size": 512,
    "vocab_size": 1024,
}
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_size": 256,
    "shared_experts": 1,
    "dense_layers": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**SMALL, "num_layers": 6, "num_heads": 8, "num_kv_heads": 2},
    "experts": {**SMALL, **EXPERTS},
    "latent": {**SMALL, "attention": "latent", "latent_size": 64, "rope_head_dim": 32},
}


@pytest.fixture(scope="session")
def make_decoder_job() -> Callable[..., Job]:
    """``make_decoder_job(kind, cluster=...)``: a small job of this kind with changed tables."""

    def make(kind: str = "dense", **tables: Any) -> Job:
        tree: dict[str, Any] = {
            "name": kind,
            "model": dict(MODELS.get(kind, {"preset": kind})),
            "cluster": {"preset": "h100-sxm"},
            "data": {"path": "text", "seq_len": 64},
            "train": {"steps": 4, "global_batch": 8, "precision": "bf16"},
        }
        for name, keys in tables.items():
            tree[name] = {**tree.get(name, {}), **keys}
        return build_job(tree, to_run=False)

    return make
