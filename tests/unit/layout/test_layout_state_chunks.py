"""Chunks of the state: in every layout they are a partition of every full tensor, shared by the replicas."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legal_layouts import list_legal_jobs
from meshwright.layout.parameters import list_parameters
from meshwright.layout.state_chunks import (
    TensorSlice,
    list_full_tensors,
    local_chunks,
    local_rows,
    shard_chunks,
    written_chunks,
)
from meshwright.spec.load import build_job

MODELS = {
    "dense": {"num_kv_heads": 2, "vocab_size": 37, "tied_embeddings": True},
    "experts": {
        "num_kv_heads": 1, "vocab_size": 33, "ffn_bias": True, "num_experts": 4, "experts_per_token": 2,
        "expert_ffn_size": 8, "shared_experts": 1, "dense_layers": 1,
    },
}  # fmt: skip
"""Vocabularies that tp does not divide, fewer key heads than tp ranks, tied embeddings, biases of experts."""


def build(model, **tables):
    shape = {"preset": None, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "ffn_size": 16}
    return build_job(
        {
            "name": "chunks",
            "model": {**shape, **MODELS[model]},
            "data": {"path": "text", "seq_len": 32},
            "train": {"steps": 1, "global_batch": 16},
            "cluster": {"preset": "local", "device": "cpu"},
            "layout": {"micro_batch": 1},
            **tables,
        }
    )


@functools.cache
def legal_jobs():
    """All legal layouts of both models on at most 16 ranks, with degrees up to four."""
    return [job for model in MODELS for job in list_legal_jobs(build(model), replicas=3)]


def jobs():
    """A sample of them."""
    return st.deferred(lambda: st.sampled_from(legal_jobs()))


def test_the_sample_has_every_kind_of_sharding():
    layouts = [job.layout for job in legal_jobs()]
    for condition in (
        "tp == 4",
        "etp > 1 and zero == 3 and dp_shard > 1",
        "pp > 1",
        "ep > 1",
        "cp > 1 and zero",
    ):
        assert any(eval(condition, vars(layout).copy()) for layout in layouts), condition


@settings(max_examples=80, deadline=None)
@given(job=jobs())
def test_the_chunks_of_all_ranks_are_a_partition_of_every_tensor(job):
    """Every element is written by exactly one rank."""
    written = {name: np.zeros(shape, np.int64) for name, shape in list_full_tensors(job).items()}
    for rank in range(job.layout.world_size):
        for chunk in written_chunks(job, rank):
            written[chunk.tensor][chunk.tensor_slice.index] += 1
    assert all((count == 1).all() for count in written.values())


@settings(max_examples=80, deadline=None)
@given(job=jobs())
def test_a_rank_writes_only_what_it_holds(job):
    """The chunk has the place of the rows in the local tensor of the rank."""
    shapes = {p.name: p.shape for p in list_parameters(job.model)}
    tensors = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    for rank in range(job.layout.world_size):
        local: dict[str, np.ndarray] = {}
        for chunk in written_chunks(job, rank):
            name, _, key = chunk.tensor.partition(":")
            if key == "step":
                continue
            full = tensors[name]
            if name not in local:
                parts = [
                    full[held.tensor_slice.index] for held in shard_chunks(job, rank, name, shapes[name])
                ]
                local[name] = np.concatenate(parts)
            assert (
                local[name][chunk.first : chunk.first + chunk.rows] == full[chunk.tensor_slice.index]
            ).all()


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_shards_are_rows_of_the_local_tensor(job):
    """The rows of one shard follow each other in the local tensor, which has room for the padding."""
    for parameter in list_parameters(job.model):
        for rank in range(job.layout.world_size):
            chunks = local_chunks(job, rank, parameter.name, parameter.shape)
            ends = [chunk.first + chunk.rows for chunk in chunks]
            assert [chunk.first for chunk in chunks] == [0, *ends][: len(chunks)]
            assert max(ends, default=0) <= local_rows(job, rank, parameter.name, parameter.shape)


@pytest.mark.parametrize(
    "layout", [{"dp_replicate": 4}, {"dp_shard": 4, "zero": 1}, {"dp_shard": 4}, {"dp_replicate": 2, "tp": 2}]
)
def test_replicas_share_the_bytes(layout):
    """No rank writes more than its share by more than a row of each tensor."""
    job = build("dense", layout={"micro_batch": 1, **layout})
    sizes = [sum(chunk.bytes for chunk in written_chunks(job, rank)) for rank in range(4)]
    rows = sum(4 * shape[-1] for shape in list_full_tensors(job).values() if shape)
    assert max(sizes) - min(sizes) <= rows
    assert sum(sizes) == sum(4 * TensorSlice.full(shape).count for shape in list_full_tensors(job).values())


def test_boxes_intersect():
    one, other = TensorSlice((2, 0), (4, 3)), TensorSlice((4, 2), (9, 9))
    assert one.intersect(other) == TensorSlice((4, 2), (2, 1))
    assert TensorSlice((4, 2), (2, 1)).relative_to(one) == TensorSlice((2, 2), (2, 1))
    assert one.intersect(TensorSlice((6, 0), (1, 1))) is None
    assert TensorSlice.full(()).intersect(TensorSlice.full(())) == TensorSlice((), ())
