"""Predictions by kind of parameter, block and pp rank equal those of each one."""

from __future__ import annotations

import dataclasses
import os

import pytest

from meshwright.layout.fsdp_groups import padded_count
from meshwright.layout.stages import (
    local_parameter_kinds,
    local_parameters,
    local_stages,
    representative_pp_rank,
)
from meshwright.plan.memory import block as block_memory
from meshwright.plan.memory import ledger
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.predict import complete_layout
from meshwright.plan.traffic import predict as comms
from meshwright.plan.traffic.predict import predict_traffic
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.files import write_schedule

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 64, "dense_layers": 3}
LAYOUTS = [
    {"recompute": "none"},
    {"dp_replicate": 4, "recompute": "full"},
    {"dp_shard": 4, "zero": 1, "recompute": "selective"},
    {"dp_shard": 4, "zero": 2},
    {"dp_shard": 4, "zero": 3, "recompute": "full"},
    {"dp_shard": 4, "zero": 3, "prefetch": 0},
    {"dp_shard": 4, "zero": 3, "prefetch": 3, "recompute": "selective"},
    {"dp_shard": 4, "zero": 3, "accumulate": "deferred"},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "dp_shard": 2, "zero": 3},
    {"pp": 2, "schedule": "zb-h1", "dp_shard": 2, "zero": 2, "recompute": "full"},
    {"pp": 4, "schedule": "1f1b", "dp_shard": 2, "zero": 1},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 3, "dp_replicate": 2},
    # pp ranks 2 and 3 have equal stages; those of pp rank 3 send to each other.
    {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "stage_layers": [1, 1, 2, 2, 2, 2, 1, 1]},
]


@pytest.fixture
def settled(make_job):
    """``settled({"pp": 2})`` is a job of twelve layers with a complete layout."""

    def make(layout, **model):
        job = make_job(
            model={"num_layers": 12, **model},
            cluster={"preset": "local", "device": "cpu", "devices_per_node": 8},
            layout={"micro_batch": 1, **layout},
        )
        return dataclasses.replace(job, layout=complete_layout(job, job.layout))

    return make


def ledgers(job, micro_batches):
    """The ledgers of all pp ranks."""
    return [predict_ledger(job, 1, micro_batches, pp_rank) for pp_rank in range(job.layout.pp)]


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_peak_of_equal_blocks_is_at_their_ends(settled, monkeypatch, layout, model):
    job = settled(layout, **model)
    micro_batches = 8 // job.layout.data_degree
    found = ledgers(job, micro_batches)
    monkeypatch.setattr(
        block_memory.BlockSequence, "find_extremes", lambda blocks, window=0: set(range(len(blocks.blocks)))
    )
    renamed = dataclasses.replace(job, name="all-layers")  # avoids the cache
    assert found == ledgers(renamed, micro_batches)


@pytest.mark.parametrize("layout", LAYOUTS[-5:], ids=str)
def test_equal_pp_ranks_have_equal_memory_and_traffic(settled, monkeypatch, layout):
    job = settled(layout)
    found = ledgers(job, 4), [predict_traffic(job, pp_rank) for pp_rank in range(job.layout.pp)]
    assert representative_pp_rank(job, 0) == 0
    for module in (comms, ledger):
        monkeypatch.setattr(module, "representative_pp_rank", lambda job, pp_rank: pp_rank)
    renamed = dataclasses.replace(job, name="one-by-one")
    assert found == (
        ledgers(renamed, 4),
        [predict_traffic(renamed, pp_rank) for pp_rank in range(job.layout.pp)],
    )


def test_middle_pp_ranks_are_equal(settled):
    job = settled({"pp": 6, "stage_layers": [2] * 6})
    assert [representative_pp_rank(job, pp_rank) for pp_rank in range(6)] == [0, 1, 1, 1, 1, 5]


@pytest.mark.parametrize("model", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS[-5:], ids=str)
def test_parameter_kinds_count_all_parameters(settled, layout, model):
    job = settled(layout, **model)
    for pp_rank in range(job.layout.pp):
        every, kinds = local_parameters(job, pp_rank), local_parameter_kinds(job, pp_rank)
        assert sum(p.repeats for p in kinds) == len(every) > len(kinds)
        assert sum(p.count for p in kinds) == sum(p.count for p in every)
        assert sum(padded_count(p, 7) for p in kinds) == sum(padded_count(p, 7) for p in every)


def test_representative_stage_has_the_same_blocks(settled):
    job = settled({"pp": 4}, **EXPERTS)
    for pp_rank in range(4):
        (part,) = local_stages(job, pp_rank)
        like = part.representative
        assert (len(like.layers), like.expert_layers) == (len(part.layers), part.expert_layers)
        assert [p.shape for p in like.parameters] == [p.shape for p in part.parameters]


def test_changed_schedule_file_is_read_again(settled, tmp_path):
    path = tmp_path / "own.csv"
    found = []
    for at, name in enumerate(("zbv", "interleaved")):
        write_schedule(build_schedule(name, 2, 8, 2), path)
        os.utime(path, (at, at))  # file times may be too coarse for consecutive writes
        job = settled({"pp": 2, "schedule_file": str(path), "stage_layers": [3] * 4})
        by_name = settled({"pp": 2, "schedule": name, "virtual_stages": 2, "stage_layers": [3] * 4})
        for pp_rank in range(2):
            assert predict_ledger(job, 1, 8, pp_rank) == predict_ledger(by_name, 1, 8, pp_rank)
            assert predict_traffic(job, pp_rank) == predict_traffic(by_name, pp_rank)
        found.append(predict_ledger(job, 1, 8))
    assert found[0] != found[1]
