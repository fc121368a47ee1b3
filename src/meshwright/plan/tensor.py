"""What a rank of tensor and sequence parallelism holds, written down without torch.

A rank of ``tp`` holds a **narrower model**: its heads, its part of the feed-forward, its rows of the
vocabulary (filled up to the same number on every rank); norms, positions and the biases behind a sum are
whole on all. Where key heads are fewer than ranks, each lies on several of them.

``plan.tensor_traffic`` counts what that moves.
"""

from __future__ import annotations

import dataclasses
import functools

from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model

COPIES_AXIS = "tp_kv"
"""The ranks that hold copies of the same key heads."""
_WHOLE = ("attention_norm", "ffn_norm", "norm", "positions")
"""Modules that no rank cuts."""


def held_model(job: Job) -> Model:
    """The model as the matrices of one rank make it."""
    if job.layout.tp == 1 or not isinstance(job.model, DecoderModel):
        return job.model
    return narrow(job.model, job.layout.tp)


@functools.lru_cache(maxsize=64)
def narrow(model: DecoderModel, tp: int) -> DecoderModel:
    """What one of ``tp`` ranks holds of a decoder, as a decoder."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=model.head_size,
        ffn_size=model.ffn_size // tp,
        vocab_size=-(-model.vocab_size // tp),
    )


def count_copies(model: DecoderModel, tp: int) -> int:
    """Ranks that hold the same key heads."""
    return max(1, tp // model.num_kv_heads)


def is_whole(name: str) -> bool:
    """Whether every rank of ``tp`` holds all of a parameter."""
    owner, _, leaf = name.rpartition(".")
    module = owner.rpartition(".")[2]
    return module in _WHOLE or (leaf == "bias" and module in ("wo", "down"))


def is_copied(name: str) -> bool:
    """Whether a parameter makes keys or values."""
    return name.split(".")[-2] in ("wk", "wv")
