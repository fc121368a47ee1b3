"""State and collectives of ZeRO, compared with torch's sharding rules and counted by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.layout.fsdp_groups import chunk_rows, list_groups, padded_count, sharded_state_bytes
from meshwright.layout.optimizer_offload import staging_sizes
from meshwright.layout.parameters import Parameter, list_parameters
from meshwright.layout.stages import list_stages
from meshwright.plan.build import build_plan
from meshwright.plan.predict import predict
from meshwright.plan.traffic.predict import predict_traffic
from meshwright.spec.layout import Layout
from meshwright.spec.load import load_job


def rows_of(job):
    return {(row.axis, row.op, row.phase): (row.calls, row.bytes) for row in predict_traffic(job)}


@given(rows=st.integers(1, 40), ranks=st.integers(1, 12))
def test_rows_are_sharded_like_torch_chunk(rows, ranks):
    """Remaining ranks have no rows."""
    pieces = [len(piece) for piece in torch.arange(rows).chunk(ranks)]
    pieces += [0] * (ranks - len(pieces))
    assert [len(chunk_rows(rows, ranks, rank)) for rank in range(ranks)] == pieces
    assert padded_count(Parameter("x", (rows, 3)), ranks) == max(pieces) * ranks * 3


def test_every_parameter_is_in_one_fsdp_group(job_file):
    (part,) = list_stages(load_job(str(job_file)))
    grouped = [p for group in list_groups(part) for p in group.parameters]
    assert sorted(p.name for p in grouped) == sorted(p.name for p in list_parameters(part.model))
    assert [group.name for group in list_groups(part)] == ["blocks.0", "blocks.1", "around the blocks"]


@pytest.mark.parametrize(("zero", "parameters", "optimizer"), [(1, 1, 2), (2, 2, 2), (3, 2, 2)])
def test_state_by_zero_stage_if_rows_divide(job_file, zero, parameters, optimizer):
    """The formulas are P+G+O/N and (P+G+O)/N. Step counts are not sharded."""
    job = load_job(str(job_file), ["layout.dp_shard=2", f"layout.zero={zero}"])
    count, tensors = sum(p.count for p in list_parameters(job.model)), len(list_parameters(job.model))
    for rank in (0, 1):
        assert sharded_state_bytes(job, rank) == {
            "parameters": 4 * count // parameters,
            "gradients": 4 * count // parameters,
            "optimizer": 8 * count // optimizer + 4 * tensors,
        }


def test_uneven_rows_pad_parameters_but_not_moments(job_file):
    """Three ranks have 22, 22 and 20 of 64 rows. Their moments sum to the whole, their parameters to more."""
    job = load_job(str(job_file), ["layout.dp_shard=3"])
    count, tensors = sum(p.count for p in list_parameters(job.model)), len(list_parameters(job.model))
    states = [sharded_state_bytes(job, rank) for rank in range(3)]
    assert sum(state["optimizer"] - 4 * tensors for state in states) == 8 * count
    assert states[0]["optimizer"] > states[2]["optimizer"]
    assert states[0]["parameters"] == states[2]["parameters"] > 4 * count / 3


def test_collectives_of_each_zero_stage(job_file):
    """Two blocks and the root group with two micro-batches are counted by hand."""
    given = ["layout.dp_shard=2", "layout.micro_batch=3"]
    stages = {z: rows_of(load_job(str(job_file), [*given, f"layout.zero={z}"])) for z in (1, 2, 3)}
    count = sum(p.count for p in list_parameters(load_job(str(job_file)).model)) * 4
    around = sum(p.count for p in list_groups(list_stages(load_job(str(job_file)))[0])[-1].parameters) * 4
    assert stages[1]["dp_shard", "all_reduce", "step"] == (1, count)
    assert stages[1]["dp_shard", "all_gather", "step"] == (1, count)
    assert stages[2]["dp_shard", "all_gather", "step"] == (3, count)
    assert stages[3]["dp_shard", "all_gather", "step"] == (10, 2 * (2 * count - around))
    for zero in (2, 3):
        assert stages[zero]["dp_shard", "reduce_scatter", "step"] == (6, 2 * count)
    assert stages[3]["control", "all_reduce", "step"] == (2, 48)  # requests; the gradient norm


def test_deferred_reduction_has_one_reduce_scatter_and_unsharded_gradients(job_file):
    """Three micro-batches have a third of the reduce-scatters and the same all-gathers.

    The peak includes the gradients.
    """
    given = ["layout.dp_shard=2", "layout.micro_batch=2"]
    for zero in (2, 3):
        jobs = [
            load_job(str(job_file), [*given, f"layout.zero={zero}", f"layout.accumulate={when}"])
            for when in ("sharded", "deferred")
        ]
        often, once = (rows_of(job) for job in jobs)
        calls, size = once.pop(("dp_shard", "reduce_scatter", "step"))
        assert often.pop(("dp_shard", "reduce_scatter", "step")) == (3 * calls, 3 * size)
        assert often == once
        assert sharded_state_bytes(jobs[0], 0) == sharded_state_bytes(jobs[1], 0), (
            "equal after the last backward pass"
        )
        sharded, deferred = (build_plan(job)[0].ranks[0] for job in jobs)
        lines = {line.name: line.bytes for line in deferred.lines}
        assert deferred.peak_bytes > sharded.peak_bytes
        assert lines["gradients at peak"] >= 4 * sum(p.count for p in list_parameters(jobs[0].model))


def test_bf16_gradients_halve_only_the_reduced_bytes(job_file):
    """Hybrid sharding all-reduces bf16 gradients in every micro-batch. Partial sums would be rounded."""
    given = ["layout.dp_replicate=2", "layout.dp_shard=2", "layout.micro_batch=1"]
    exact = rows_of(load_job(str(job_file), given))
    low = rows_of(load_job(str(job_file), [*given, "compression.kind=bf16"]))
    calls, size = exact.pop(("dp_shard", "reduce_scatter", "step"))
    assert low.pop(("dp_shard", "reduce_scatter", "step")) == (calls, size // 2)
    calls, size = exact.pop(("dp_replicate", "all_reduce", "step"))
    assert low.pop(("dp_replicate", "all_reduce", "step")) == (3 * calls, 3 * size // 2)
    assert low == exact


def test_blocks_are_gathered_in_the_compute_dtype(job_file):
    given = ["layout.dp_shard=2", "layout.micro_batch=6"]
    exact = rows_of(load_job(str(job_file), given))["dp_shard", "all_gather", "step"]
    low = rows_of(load_job(str(job_file), [*given, "train.precision=bf16"]))["dp_shard", "all_gather", "step"]
    around = sum(p.count for p in list_groups(list_stages(load_job(str(job_file)))[0])[-1].parameters) * 4
    assert low[0] == exact[0]
    assert low[1] - around == (exact[1] - around) // 2


def test_hybrid_sharding_all_reduces_its_shard_once_per_step(job_file):
    given = ["layout.dp_replicate=2", "layout.dp_shard=2", "layout.micro_batch=1"]
    rows = rows_of(load_job(str(job_file), given))
    count = sum(p.count for p in list_parameters(load_job(str(job_file)).model)) * 4
    assert rows["dp_replicate", "all_reduce", "step"] == (3, count // 2)
    first = rows_of(load_job(str(job_file), [*given, "layout.zero=1"]))
    assert first["dp_replicate+dp_shard", "all_reduce", "step"] == (1, count)


def test_more_ranks_hold_less_state_and_gathered_blocks_are_in_the_peak(job_file):
    plans = {
        zero: build_plan(load_job(str(job_file), ["layout.dp_shard=2", f"layout.zero={zero}"]))[0]
        for zero in (1, 2, 3)
    }
    lines = {line.name: line.bytes for line in plans[3].ranks[0].lines}
    assert lines["all-gathered parameters"] > 0
    assert plans[3].ranks[0].peak_bytes <= plans[2].ranks[0].peak_bytes <= plans[1].ranks[0].peak_bytes
    assert sum(lines.values()) == plans[3].ranks[0].peak_bytes


def test_planner_shards_only_if_no_replica_fits(job_file):
    """The device has memory for the shards but not for the whole state."""
    given = ["layout.micro_batch=1", "model.num_layers=8", "train.eval_every=0"]
    roomy, _ = build_plan(load_job(str(job_file), given))
    assert roomy.job.layout.dp_shard == 1
    whole = build_plan(load_job(str(job_file), [*given, "layout.dp_replicate=1"]))[0].ranks[0]
    cut = build_plan(load_job(str(job_file), [*given, "layout.dp_shard=2"]))[0].ranks[0]
    room = (whole.peak_bytes + cut.peak_bytes) // 2
    tight, _ = build_plan(load_job(str(job_file), [*given, f"cluster.memory_bytes={room}"]))
    assert tight.job.layout.dp_shard == 2
    assert tight.job.layout.zero in (2, 3)
    for ranks in (1, 2):
        assert not predict(tight.job, Layout("given", dp_replicate=ranks, micro_batch=1)).fits


def test_offloading_replaces_optimizer_state_by_staging_buffers(job_file):
    """There are three buffers of the size of their largest bucket. All state is counted once by kind."""
    assert staging_sizes([5, 1, 2, 3, 9]) == [5, 9, 2]
    assert staging_sizes([7]) == [7]
    given = ["layout.dp_replicate=1", "layout.micro_batch=1", "layout.bucket_mb=0.05"]
    here, away = (
        build_plan(load_job(str(job_file), [*given, f"layout.offload={what}"]))[0].ranks[0]
        for what in ("none", "optimizer")
    )
    assert away.state_bytes == here.state_bytes
    assert away.offloaded_bytes == {
        "parameters": 0,
        "gradients": 0,
        "optimizer": here.state_bytes["optimizer"],
    }
    lines = {line.name: line.bytes for line in away.lines}
    assert lines["optimizer"] == 0 < lines["offload buffers"]
    assert here.peak_bytes - away.peak_bytes == here.state_bytes["optimizer"] - lines["offload buffers"]


def test_offloaded_gradients_of_a_gpu_are_not_padded(job_file):
    """They are copied row by row. On a CPU they stay in the padded buffer of the reduce-scatter."""
    given = ["layout.dp_shard=3", "layout.offload=all"]
    on_core, on_gpu = (
        sharded_state_bytes(load_job(str(job_file), [*given, *more]), 0)
        for more in ((), ("cluster.device=cuda", "cluster.devices_per_node=3"))
    )
    count = sum(p.count for p in list_parameters(load_job(str(job_file)).model))
    states = [
        sharded_state_bytes(
            load_job(str(job_file), [*given, "cluster.device=cuda", "cluster.devices_per_node=3"]), r
        )
        for r in range(3)
    ]
    assert sum(state["gradients"] for state in states) == 4 * count
    assert on_core["parameters"] == on_core["gradients"] == on_gpu["parameters"] > 4 * count / 3
