"""Memory while a checkpoint is written: all state on the device, and one gathered tensor."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.plan.memory.checkpoint import predict_checkpoint
from meshwright.plan.memory.fit import USABLE_MEMORY
from meshwright.plan.memory.ledger import GPU_WORKSPACE_BYTES
from meshwright.plan.predict import predict

TABLE = 320 * 64
"""Elements of the tiny model's largest tensor, the embedding."""


def settled(make_job, **layout):
    job = make_job(layout={"micro_batch": 1, **layout})
    return dataclasses.replace(job, layout=predict(job, job.layout).layout)


@pytest.mark.parametrize(
    ("layout", "beside"),
    [
        ({"dp_replicate": 2}, TABLE),
        ({"dp_shard": 4, "zero": 1}, TABLE * 4 + TABLE * 4 // 4 + TABLE),
        ({"dp_shard": 4, "zero": 3}, TABLE * 4 + TABLE * 4 // 4 + TABLE),
        ({"tp": 2}, 2 * TABLE * 4 + TABLE),
        ({"tp": 2, "dp_shard": 2, "zero": 1}, TABLE * 2 + TABLE * 2 // 2 + 2 * TABLE * 4 + TABLE),
    ],
    ids=str,
)
def test_one_tensor_is_gathered_and_checked_beside_the_state(make_job, layout, beside):
    """Sharded: all rows and a send buffer.

    With tp: the shards and the full tensor. Then one byte per element.
    """
    job = settled(make_job, **layout)
    assert predict_checkpoint(job, 0, 1_000_000) == 1_000_000 + GPU_WORKSPACE_BYTES + beside


def test_offloaded_state_does_not_count_on_the_device(make_job):
    whole, away = (settled(make_job, dp_replicate=2, offload=name) for name in ("none", "optimizer"))
    found, less = predict(whole, whole.layout), predict(away, away.layout)
    state = found.ledger.state_bytes
    assert found.need.checkpoint == predict_checkpoint(whole, 0, sum(state.values()))
    assert found.need.checkpoint - less.need.checkpoint == pytest.approx(state["optimizer"], rel=0.01)


def test_each_pp_rank_gathers_its_own_tensors(make_job):
    """The last stage of an untied model has the head. A middle stage has no embedding to gather."""
    job = make_job(
        model={"num_layers": 4, "tied_embeddings": False, "vocab_size": 32000},
        layout={"pp": 4, "dp_shard": 2, "zero": 1, "micro_batch": 1},
    )
    job = dataclasses.replace(job, layout=predict(job, job.layout).layout)
    first, middle, _, last = (predict_checkpoint(job, rank, 0) - GPU_WORKSPACE_BYTES for rank in range(4))
    assert first == last > 10 * middle > 0


def test_a_checkpoint_can_be_the_peak_that_does_not_fit(make_job):
    """With tp, a large embedding and few tokens, gathering the embedding takes more than a step."""
    job = make_job(
        model={"num_layers": 1, "vocab_size": 256_000},
        cluster={"device": "cpu"},
        data={"seq_len": 8},
        layout={"tp": 4, "micro_batch": 1},
    )
    need = predict(job, job.layout).need
    assert need.limited_by == "checkpoint"
    small, enough = (
        dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, memory_bytes=room))
        for room in (int(need.steady_step / USABLE_MEMORY) + 2, int(need.checkpoint / USABLE_MEMORY) + 2)
    )
    assert predict(small, job.layout).shortage.startswith("does not fit: checkpoint needs")
    assert not predict(small, job.layout).fits
    assert predict(enough, job.layout).fits
