"""The tensors of in-memory snapshots: their size is as predicted, and some ranks have the whole state."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legal_layouts import list_legal_jobs
from meshwright.layout.snapshot_size import predict_snapshot_bytes, reserved_bytes, slot_bytes
from meshwright.layout.snapshot_tensors import covers_state, fingerprint, list_snapshot_tensors
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import build_job

MODELS = {
    "dense": {"num_kv_heads": 2, "vocab_size": 37, "tied_embeddings": True},
    "experts": {
        "num_kv_heads": 1, "vocab_size": 33, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8,
    },
}  # fmt: skip


def build(model, **train):
    shape = {"preset": None, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "ffn_size": 16}
    return build_job(
        {
            "name": "snapshots",
            "model": {**shape, **MODELS[model]},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": 1, "global_batch": 16, **train},
            "cluster": {"preset": "local", "device": "cpu"},
            "layout": {"micro_batch": 1},
        }
    )


@functools.cache
def legal_jobs():
    settings_of = ({}, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "muon"})
    return [
        job for model in MODELS for train in settings_of for job in list_legal_jobs(build(model, **train))
    ]


def given_layout(model="dense", **degrees):
    return with_layout(build(model), Layout(mode="given", micro_batch=1, **degrees))


@settings(max_examples=150)
@given(st.deferred(lambda: st.sampled_from(legal_jobs())), st.randoms(use_true_random=False))
def test_the_sizes_of_all_tensors_give_the_predicted_memory(job, random):
    rank = random.randrange(job.layout.world_size)
    tensors = list_snapshot_tensors(job, rank)
    assert reserved_bytes(slot_bytes(tensor.bytes for tensor in tensors)) == predict_snapshot_bytes(job, rank)
    assert all(chunk.first + chunk.rows <= tensor.rows for tensor in tensors for chunk in tensor.chunks)


@settings(max_examples=60)
@given(st.deferred(lambda: st.sampled_from(legal_jobs())))
def test_all_ranks_together_have_the_whole_state(job):
    assert covers_state(job, range(job.layout.world_size))


@pytest.mark.parametrize(
    ("degrees", "ranks", "whole"),
    [
        ({"dp_replicate": 4}, [2], True),
        ({"dp_shard": 4, "zero": 3}, [0, 1, 3], False),
        ({"dp_shard": 4, "zero": 1}, [0, 1, 3], False),
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, [2, 3], True),
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, [0, 2], False),
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, [0, 3], True),
        ({"dp_replicate": 2, "tp": 2}, [2, 3], True),
        ({"dp_replicate": 2, "tp": 2}, [0, 2], False),
        ({"pp": 2, "stage_layers": (1, 1), "dp_replicate": 2}, [1, 2], True),
        ({"pp": 2, "stage_layers": (1, 1), "dp_replicate": 2}, [0, 1], False),
        ({}, [], False),
    ],
)
def test_some_ranks_have_the_whole_state_if_they_have_a_replica_of_every_shard(degrees, ranks, whole):
    assert covers_state(given_layout(**degrees), ranks) is whole


def test_the_fingerprint_depends_on_names_sizes_and_order():
    one, other = ("a", 2), ("b", 3)
    found = {fingerprint(rows) for rows in ([one, other], [other, one], [one], [("a", 3), other])}
    assert len(found) == 4
