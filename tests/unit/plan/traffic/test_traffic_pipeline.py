"""Traffic, state and memory of pipelines, counted by hand for small cases.

The tiny model has 320 x 64 = 20480 elements of (tied) embedding, blocks of 36992 and a final norm of 64.
Samples have 32 tokens. A micro-batch of one is 32 x 64 x 4 = 8192 bytes of residual stream.
"""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.core.errors import UserError
from meshwright.layout.fsdp_groups import list_groups, sharded_state_bytes
from meshwright.layout.stages import local_stages
from meshwright.plan.build import build_plan, plan_from, summarize_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.predict import predict
from meshwright.plan.search.reasons import explain_stages
from meshwright.plan.traffic.predict import predict_traffic

EMBEDDING, BLOCK, NORM, RESIDUAL = 20480, 36992, 64, 8192
"""Elements, but for the stream, which is in bytes."""
TENSORS = {"embed": 1, "block": 9, "norm": 1}


@pytest.fixture
def settled(make_job):
    """A CPU job with a complete layout and eight samples in micro-batches of one."""

    def make(layers=2, tied=True, train=None, **layout):
        job = make_job(
            model={"num_layers": layers, "tied_embeddings": tied},
            cluster={"preset": "local", "device": "cpu", "devices_per_node": 8},
            train={"eval_samples": 6, **(train or {})},
            layout={"micro_batch": 1, **layout},
        )
        return dataclasses.replace(job, layout=predict(job, job.layout).layout)

    return make


def rows(job, pp_rank):
    return {(t.axis, t.op, t.phase): (t.calls, t.bytes) for t in predict_traffic(job, pp_rank)}


# Sends between stages


@pytest.mark.parametrize(
    ("layout", "step", "evaluation"),
    [
        # The first pp rank sends 8 micro-batches, the last sends 8 gradients.
        ({"pp": 2}, (8, 8), (6, 0)),
        # The middle pp rank sends in both directions.
        ({"pp": 4, "layers": 4}, (8, 16, 16, 8), (6, 6, 6, 0)),
        # Stages 0 and 2 send to 1 and 3, and stage 1 to 2; gradients are sent back the same way.
        ({"pp": 2, "layers": 4, "schedule": "interleaved", "virtual_stages": 2}, (24, 24), (12, 6)),
        # Stages 1 and 2 are on the same rank: only two boundaries need sends, in each direction.
        ({"pp": 2, "layers": 4, "schedule": "zbv", "virtual_stages": 2}, (16, 16), (6, 6)),
    ],
)
def test_each_stage_boundary_has_one_send_in_each_direction(settled, layout, step, evaluation):
    job = settled(**layout)
    for pp_rank, (calls, forward) in enumerate(zip(step, evaluation, strict=True)):
        found = rows(job, pp_rank)
        assert found["pp", "send", "step"] == (calls, calls * RESIDUAL)
        assert found.get(("pp", "send", "eval"), (0, 0)) == (forward, forward * RESIDUAL)


def test_sequence_parallel_stages_send_their_part_of_the_sequence(settled):
    whole, split = (settled(pp=2, tp=2, sequence_parallel=on) for on in (False, True))
    assert rows(whole, 0)["pp", "send", "step"] == (8, 8 * RESIDUAL)
    assert rows(split, 0)["pp", "send", "step"] == (8, 8 * RESIDUAL // 2)


def test_gradients_of_tied_embeddings_are_all_reduced(settled):
    job = settled(layers=4, pp=4)
    found = [rows(job, pp_rank).get(("pp_tied", "all_reduce", "step")) for pp_rank in range(4)]
    assert found == [(1, 4 * EMBEDDING), None, None, (1, 4 * EMBEDDING)]
    halves = settled(pp=2, tp=2)
    assert rows(halves, 1)["pp_tied", "all_reduce", "step"] == (1, 4 * EMBEDDING // 2)
    shards = settled(pp=2, dp_shard=2, zero=3)
    assert rows(shards, 1)["pp_tied", "all_reduce", "step"] == (1, 4 * EMBEDDING // 2)


@pytest.mark.parametrize(
    "layout", [{"tied": False}, {"layers": 4, "schedule": "zbv", "virtual_stages": 2}], ids=["apart", "zbv"]
)
def test_single_embedding_is_not_all_reduced(settled, layout):
    job = settled(pp=2, **layout)
    assert all(t.axis != "pp_tied" for pp_rank in (0, 1) for t in predict_traffic(job, pp_rank))


# Combined with other axes


def test_replicas_all_reduce_the_buckets_of_each_stage(settled):
    job = settled(pp=2, dp_replicate=2, bucket_mb=0.1)  # 25600 elements: most matrices fill it with others
    for pp_rank, elements in enumerate((EMBEDDING + BLOCK, EMBEDDING + BLOCK + NORM)):
        found = rows(job, pp_rank)
        calls, size = found["dp_replicate", "all_reduce", "step"]
        assert size == 4 * elements
        assert calls > 1, "one bucket would be too large"
        assert ("dp_replicate", "broadcast", "setup") not in found, "pipelines do not use DDP"
        assert found["pp", "send", "setup"] == (1, 4), "one element to the other rank"
    assert rows(job, 0)["control", "all_reduce", "step"] == (2, 48), "the gradient norm is summed too"


def test_no_bucket_has_parameters_of_two_stages(settled):
    job = settled(layers=4, pp=2, dp_replicate=2, schedule="zbv", virtual_stages=2)
    assert rows(job, 0)["dp_replicate", "all_reduce", "step"] == (2, 4 * (EMBEDDING + 2 * BLOCK + NORM))
    assert rows(job, 1)["dp_replicate", "all_reduce", "step"] == (2, 4 * 2 * BLOCK)


def test_zero_1_gathers_updated_parameters(settled):
    job = settled(pp=2, dp_shard=2, zero=1)
    assert rows(job, 0)["dp_shard", "all_reduce", "step"] == (1, 4 * (EMBEDDING + BLOCK))
    assert rows(job, 0)["dp_shard", "all_gather", "step"] == (1, 4 * (EMBEDDING + BLOCK))


def test_zero_3_gathers_blocks_twice_and_the_root_group_once_per_micro_batch(settled):
    job = settled(layers=4, pp=4, dp_shard=2, zero=3)  # 4 micro-batches a rank
    first, middle, last = (rows(job, pp_rank) for pp_rank in (0, 1, 3))
    assert middle["dp_shard", "all_gather", "step"] == (8, 8 * 4 * BLOCK)
    assert middle["dp_shard", "reduce_scatter", "step"] == (4, 4 * 4 * BLOCK)
    assert first["dp_shard", "all_gather", "step"] == (12, 4 * (8 * BLOCK + 4 * EMBEDDING))
    assert last["dp_shard", "reduce_scatter", "step"] == (8, 4 * 4 * (BLOCK + EMBEDDING + NORM))
    assert middle["dp_shard", "all_gather", "eval"] == (3, 3 * 4 * BLOCK)
    assert [len(list_groups(local_stages(job, pp_rank)[0])) for pp_rank in range(4)] == [2, 1, 1, 2]


def test_zero_2_gathers_once_per_step(settled):
    job = settled(pp=2, dp_shard=2, zero=2, accumulate="deferred")
    assert rows(job, 0)["dp_shard", "all_gather", "step"] == (2, 4 * (BLOCK + EMBEDDING))
    assert rows(job, 0)["dp_shard", "reduce_scatter", "step"] == (2, 4 * (BLOCK + EMBEDDING))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tp_collectives_of_all_stages_equal_those_of_the_unsplit_model(settled, sequence, recompute):
    """All stages together have the calls of one process. Gradient sums are one call per rank."""
    split = {"tp": 2, "sequence_parallel": sequence, "recompute": recompute}
    whole, cut = settled(layers=4, **split), settled(layers=4, pp=4, **split)
    for kind, (calls, size) in rows(whole, 0).items():
        if kind[0] == "tp":
            found = [rows(cut, pp_rank).get(kind, (0, 0)) for pp_rank in range(4)]
            more = (
                3 if sequence and kind[1:] == ("all_reduce", "step") else 0
            )  # each rank sums its norm gradients
            assert (sum(c for c, _ in found), sum(s for _, s in found)) == (calls + more, size), kind


# State


def test_pp_ranks_hold_their_stages_and_a_copy_of_a_tied_embedding(settled):
    job = settled(layers=3, pp=2, stage_layers=[2, 1])
    states = [predict_ledger(job, 1, 8, pp_rank).state_bytes for pp_rank in (0, 1)]
    assert [s["parameters"] for s in states] == [4 * (EMBEDDING + 2 * BLOCK), 4 * (EMBEDDING + BLOCK + NORM)]
    assert [s["optimizer"] for s in states] == [
        8 * (EMBEDDING + 2 * BLOCK) + 4 * 19,
        8 * (EMBEDDING + BLOCK + NORM) + 44,
    ]


def test_fsdp_shards_only_the_stages_of_a_rank(settled):
    job = settled(pp=2, dp_shard=2, zero=3)
    held = [sharded_state_bytes(job, rank)["parameters"] for rank in range(4)]
    assert held == [2 * (EMBEDDING + BLOCK)] * 2 + [2 * (EMBEDDING + BLOCK + NORM)] * 2


# Memory


def in_flight_bytes(job, pp_rank, micro_batches):
    lines = {line.name: line.bytes for line in predict_ledger(job, 1, micro_batches, pp_rank).lines}
    return lines["in-flight activations"]


def test_gpipe_holds_every_micro_batch_and_1f1b_as_many_as_there_are_stages(settled):
    gpipe, one_f_one_b = (settled(layers=4, pp=4, schedule=name) for name in ("gpipe", "1f1b"))
    kept = predict_ledger(one_f_one_b, 1, 8, 1).activation_bytes
    assert [in_flight_bytes(one_f_one_b, pp_rank, 8) for pp_rank in (1, 2)] == [2 * kept, kept], (
        "besides the current micro-batch"
    )
    assert in_flight_bytes(one_f_one_b, 1, 16) == 2 * kept
    assert in_flight_bytes(gpipe, 1, 8) == 7 * kept
    assert in_flight_bytes(gpipe, 1, 16) == 15 * kept


def test_last_stage_keeps_the_head_gradient_of_every_micro_batch(settled):
    job = settled(pp=2, schedule="gpipe")
    first, last = (predict_ledger(job, 1, 8, pp_rank).activation_bytes for pp_rank in (0, 1))
    norm = 32 * (2 * 64 + 1) * 4
    assert last - first == 4 * EMBEDDING + RESIDUAL + norm


def test_split_backward_holds_inputs_of_deferred_weight_gradients(settled):
    """Between B and W a block holds less than between F and B, but for longer."""
    split, plain = (settled(layers=8, pp=4, schedule=name) for name in ("zb-h1", "1f1b"))
    assert predict_ledger(split, 1, 8, 3).peak_bytes > predict_ledger(plain, 1, 8, 3).peak_bytes
    assert predict_ledger(split, 1, 8, 3).activation_bytes == predict_ledger(plain, 1, 8, 3).activation_bytes


@pytest.mark.parametrize("zero", [2, 3])
def test_lines_of_sharded_stages_add_up(settled, zero):
    ledger = predict_ledger(settled(pp=2, dp_shard=2, zero=zero), 1, 4, 1)
    assert ledger.peak_bytes == sum(line.bytes for line in ledger.lines)


# Time, stages and micro-batch


def test_parts_of_a_pipeline_step_come_from_one_simulation(settled):
    """The work of an average rank, the excess of the slowest and its idle time sum to the makespan."""
    job = settled(layers=4, pp=4)
    step = predict(job, job.layout).time
    assert step.pipeline is not None
    walked = ("compute", "uneven stages", "bubble", "pipeline transfers")
    assert all(step.parts[name] > 0 for name in walked)
    assert sum(step.parts[name] for name in walked) == pytest.approx(step.pipeline.makespan_s)
    assert step.parts["compute"] + step.parts["uneven stages"] == pytest.approx(step.pipeline.work_s)
    assert 3 / 11 < step.pipeline.bubble < 0.6, "uneven stages and transfers add to (p - 1) / (m + p - 1)"


def test_layers_are_assigned_by_cost_with_a_reason(make_job):
    wide = make_job(
        model={"num_layers": 8, "vocab_size": 32768},
        cluster={"preset": "local", "device": "cpu", "devices_per_node": 4},
        layout={"pp": 4, "micro_batch": 1},
    )
    found = predict(wide, wide.layout)
    assert found.layout.stage_layers is not None
    assert sum(found.layout.stage_layers) == 8
    assert found.layout.stage_layers[-1] == 1, "the head costs more than a layer"
    why, bubble = explain_stages(wide, found)
    assert "the output head takes as long as " in why
    assert f"layers per stage {', '.join(map(str, found.layout.stage_layers))}: " in why
    assert "8 micro-batches" in bubble
    given = dataclasses.replace(wide, layout=dataclasses.replace(wide.layout, stage_layers=(2, 2, 2, 2)))
    chosen = predict(given, given.layout)
    assert chosen.layout.stage_layers == (2, 2, 2, 2)
    assert "given in the job" in explain_stages(given, chosen)[0]
    assert chosen.time.total_s > found.time.total_s


@pytest.mark.parametrize(
    ("schedule", "pp", "batch", "size", "count"),
    [
        ("1f1b", 2, 9, 2, 5),  # 3 would leave 3 micro-batches, less than two a stage
        ("interleaved", 3, 12, 2, 6),
        ("interleaved", 2, 12, 3, 4),
        ("interleaved", 2, 9, 5, 2),  # the only even number of micro-batches for nine samples
    ],
)
def test_chosen_micro_batch_suits_the_schedule(make_job, schedule, pp, batch, size, count):
    job = interleaved(make_job, schedule, pp, batch)
    found = predict(job, job.layout)
    assert (found.layout.micro_batch, found.micro_batches) == (size, count)


def test_batch_without_a_suitable_micro_batch_is_refused(make_job):
    """Four samples make 4, 2 or 1 micro-batches. Three interleaved ranks need a multiple of three."""
    with pytest.raises(UserError) as caught:
        build_plan(interleaved(make_job, "interleaved", 3, 4))
    assert [problem.code for problem in caught.value.problems] == ["layout-interleaved"]


def interleaved(make_job, schedule, pp, batch):
    stages = {"virtual_stages": 2} if schedule == "interleaved" else {}
    return make_job(
        model={"num_layers": 6},
        cluster={"preset": "local", "device": "cpu", "devices_per_node": 3},
        train={"global_batch": batch},
        layout={"pp": pp, "schedule": schedule, **stages},
    )


# The plan


def test_plan_file_has_the_prediction_of_each_pp_rank(settled, tmp_path):
    job = settled(layers=4, pp=2, dp_replicate=2)
    plan = plan_from(predict(job, job.layout))
    write_plan(plan, tmp_path / "plan.toml")
    again = read_plan(tmp_path / "plan.toml")
    assert again == plan
    for rank in range(4):
        planned = sorted((t.axis, t.op, t.phase, t.calls, t.bytes) for t in again.collectives_of(rank))
        assert planned == sorted(
            (t.axis, t.op, t.phase, t.calls, t.bytes) for t in predict_traffic(job, rank // 2)
        )
    assert {t.pp_rank for t in plan.collectives if t.axis == "control"} == {None}, "the same on all ranks"
    assert len(plan.buckets) == 2, "one per pp rank"
    summary = summarize_plan(plan)
    assert list(summary["memory_bytes"]) == ["stage 0 (ranks 0 to 1)", "stage 1 (ranks 2 to 3)"]
    assert 0 < summary["bubble"] < 1
    assert [row["first_layer"] for row in summary["stages"]] == [0, 2]
    assert all("pp_rank" not in t for t in summary["collectives"] if t["axis"] == "control")
