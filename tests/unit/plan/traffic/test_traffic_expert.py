"""Collectives of expert parallel, counted by hand: D=8, E=4, two experts per token, each 8 wide."""

from __future__ import annotations

import pytest

from meshwright.plan.build import build_plan
from meshwright.plan.traffic.predict import predict_traffic

MODEL = {
    "preset": None, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 16,
    "vocab_size": 32, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8,
}  # fmt: skip
BLOCK = 8 + 64 + 32 + 32 + 64 + 8 + 32
"""What is dense in a block: norm, queries, keys, values, output, norm, router: 240 in 7 tensors."""
AROUND = 256 + 8 + 256
"""Embedding, norm, head."""
EXPERTS = 3 * 4 * 8 * 8
"""Gate, up and down of four experts: 768 in 3 tensors."""
DENSE = 2 * BLOCK + AROUND
LOAD = 2 * (4 + 3)
"""Numbers of the load: two layers, tokens of each expert, dropped ones, two losses."""


@pytest.fixture
def rows_of(make_job):
    """Calls and bytes by axis, op and phase, with micro-batches of 2 x 32 tokens."""

    def rows(layout, model=None, **train):
        job = make_job(
            model={**MODEL, **(model or {})},
            layout={"micro_batch": 2, **layout},
            train={"steps": 4, "global_batch": 8, "eval_samples": 8, **train},
        )
        return {(row.axis, row.op, row.phase): (row.calls, row.bytes) for row in predict_traffic(job)}

    return rows


def test_tokens_are_dispatched_and_combined_by_all_to_all(rows_of):
    """There are 2 micro-batches x 2 blocks.

    Each direction has 64 tokens x 2 experts x 8 x 4 bytes. There are 4 split sizes of 8 bytes.
    """
    rows, moved = rows_of({"dp_shard": 2, "ep": 2, "zero": 3}), 64 * 2 * 8 * 4
    assert rows["ep", "all_to_all", "step"] == (4 * 5, 4 * (4 * 8 + 4 * moved))
    assert rows["ep", "all_to_all", "eval"] == (4 * 3, 4 * (4 * 8 + 2 * moved))


@pytest.mark.parametrize(("recompute", "calls"), [("none", 5), ("selective", 8), ("full", 8)])
def test_the_dispatch_is_repeated_if_blocks_are_recomputed(rows_of, recompute, calls):
    rows = rows_of({"dp_shard": 2, "ep": 2, "zero": 3, "recompute": recompute})
    assert rows["ep", "all_to_all", "step"][0] == 4 * calls


def test_every_etp_rank_receives_the_row(rows_of):
    rows, moved = rows_of({"dp_shard": 2, "etp": 2, "zero": 3}, precision="bf16"), 64 * 2 * 8 * 2 * 2
    assert rows["ep", "all_to_all", "step"] == (4 * 5, 4 * (4 * 2 * 8 + 4 * moved))


def test_without_ep_there_is_no_all_to_all(rows_of):
    rows = rows_of({"dp_shard": 2, "zero": 3})
    assert not any(axis.startswith("ep") for axis, _, _ in rows)


def test_dense_layers_have_no_all_to_all(rows_of):
    some = rows_of({"dp_shard": 2, "ep": 2, "zero": 3}, model={"dense_layers": 1})
    assert some["ep", "all_to_all", "step"][0] == 2 * 5
    assert some["control", "all_reduce", "step"] == (3, (4 + 1 + 1 + LOAD // 2) * 8)


def test_experts_held_by_one_rank_are_neither_gathered_nor_reduced(rows_of):
    """ZeRO-3 over 2 ranks with ep=2 and 2 micro-batches. Dense parameters are gathered as usual."""
    rows = rows_of({"dp_shard": 2, "ep": 2, "zero": 3})
    assert rows["dp_shard", "all_gather", "step"] == (2 * 5, 2 * (4 * BLOCK + AROUND) * 4)
    assert rows["dp_shard", "reduce_scatter", "step"] == (2 * 3, 2 * DENSE * 4)
    assert not any(axis == "ep_shard" for axis, _, _ in rows)


def test_experts_are_gathered_over_ep_shard(rows_of):
    """With four ranks and ep=2, two ranks hold the same two experts, 384 elements per block.

    There is one micro-batch in 16 bits.
    """
    rows = rows_of({"dp_shard": 4, "ep": 2, "zero": 3}, precision="bf16")
    assert rows["ep_shard", "all_gather", "step"] == (2 * 2, 2 * 2 * EXPERTS // 2 * 2)
    assert rows["ep_shard", "all_gather", "eval"] == (2, 2 * EXPERTS // 2 * 2)
    assert rows["ep_shard", "reduce_scatter", "step"] == (2, EXPERTS * 4)
    assert rows["dp_shard", "all_gather", "step"] == (5, 4 * BLOCK * 2 + AROUND * 4)
    rows = rows_of({"dp_shard": 4, "ep": 2, "zero": 2})
    assert rows["ep_shard", "all_gather", "step"] == (2, EXPERTS * 4)


def test_expert_replicas_are_all_reduced_even_if_not_sharded(rows_of):
    """FSDP2 runs no collective over one rank but all-reduces over replicas: five groups, once per step."""
    rows = rows_of({"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3})
    assert rows["dp_replicate", "all_reduce", "step"] == (5, (DENSE // 2 + EXPERTS) * 4)


def test_unsharded_expert_gradients_have_their_own_buckets_and_axis(rows_of):
    """ZeRO-1 with cp=4 and ep=2 does not use DDP.

    Dense gradients are reduced over 4 ranks, expert gradients over 2.
    """
    rows = rows_of({"cp": 4, "ep": 2, "zero": 1})
    assert rows["cp", "all_gather", "step"] == (1, DENSE * 4)
    assert rows["ep_shard", "all_reduce", "step"] == (1, EXPERTS * 4)
    assert rows["ep_shard", "all_gather", "step"] == (1, EXPERTS * 4)
    assert not any(op == "broadcast" for _, op, _ in rows)
    balance = 4 * 2  # 4 micro-batches, 2 blocks
    assert rows["cp", "all_reduce", "step"] == (1 + balance, DENSE * 4 + balance * 2 * 4 * 4)


def test_plain_replicas_use_ddp_for_experts(rows_of):
    rows = rows_of({"dp_replicate": 2})
    assert rows["dp_replicate", "all_reduce", "step"] == (1, (DENSE + 2 * EXPERTS) * 4)
    assert rows["dp_replicate", "broadcast", "setup"] == (2, (2 * 10 + 3 + 1 + 1) * 4)
    assert rows["control", "all_reduce", "step"] == (2, (4 + 1 + LOAD) * 8)
    assert rows["control", "all_reduce", "eval"] == (1, 2 * 8)


def test_tp_ranks_route_their_own_tokens(rows_of):
    """tp=2 has 4 micro-batches of 64 tokens, N D e = 2048 bytes.

    A block all-reduces attention only, forward and backward. Embedding and head have one all-reduce each, the
    loss two, the routers' gradients one per step. Outputs and gradients of the routed path are gathered.
    """
    rows = rows_of({"tp": 2}, balance_loss=0.0)
    blocks, ends, losses = 2 * 2, 2, 2
    assert rows["tp", "all_gather", "step"] == (4 * 2 * 2, 4 * 2 * 2 * 2048)
    assert rows["tp", "all_gather", "eval"] == (4 * 2, 4 * 2 * 2048)
    sums = 4 * (blocks + ends) * 2048 + 4 * 3 * 64 * 4 + 2 * 32 * 4
    assert rows["tp", "all_reduce", "step"] == (4 * (blocks + ends + losses) + 1, sums)
    assert rows["ep_shard", "all_reduce", "step"] == (1, 2 * EXPERTS * 4)


def test_sequence_parallel_ranks_route_without_an_extra_split(rows_of):
    """Gathers and scatters are those of attention, embedding and head.

    The router's gradient is summed with the norms'.
    """
    rows = rows_of({"tp": 2, "sequence_parallel": True}, balance_loss=0.0)
    assert rows["tp", "all_gather", "step"] == (4 * (2 * 2 + 2), 4 * (2 * 2 + 2) * 2048)
    whole = 2 * (8 + 8 + 32) + 8
    assert rows["tp", "all_reduce", "step"] == (4 * 2 + 1, 4 * 3 * 64 * 4 + whole * 4)


@pytest.mark.parametrize(("recompute", "gathers"), [("none", 2), ("full", 3), ("selective", 3)])
def test_shared_experts_have_the_collectives_of_a_dense_feed_forward(rows_of, recompute, gathers):
    """With recomputation, the gather of the routed path comes before them and is repeated."""
    rows = rows_of({"tp": 2, "recompute": recompute}, model={"shared_experts": 1}, balance_loss=0.0)
    again = {"none": 0, "selective": 0, "full": 2}[recompute]
    assert rows["tp", "all_reduce", "step"][0] == 4 * (2 * 4 + again + 2 + 2) + 1
    assert rows["tp", "all_gather", "step"][0] == 4 * 2 * gathers
    without = rows_of({"tp": 2, "recompute": recompute}, balance_loss=0.0)
    assert without["tp", "all_gather", "step"][0] == 4 * 2 * 2


def test_cp_ranks_sum_the_counts_of_chosen_experts(rows_of):
    """cp=2 x tp=2: 4 micro-batches x 2 blocks of 2 x 4 counts. A capacity needs the choices instead."""
    rows = rows_of({"cp": 2, "tp": 2})
    assert rows["cp+tp", "all_reduce", "step"] == (8, 8 * 2 * 4 * 4)
    assert ("cp+tp", "all_reduce", "eval") not in rows, "an evaluation has no balance loss"
    rows = rows_of({"cp": 2, "tp": 2}, model={"capacity_factor": 1.0})
    assert ("cp+tp", "all_reduce", "step") not in rows
    choices = 4 * (32 // 2) * 2 * 8
    assert rows["cp+tp", "all_gather", "step"] == (8, 8 * choices)
    assert rows["cp+tp", "all_gather", "eval"] == (8, 8 * choices)
    assert not any(axis == "cp+tp" for axis, _, _ in rows_of({"cp": 2, "tp": 2}, balance_rate=0.001))


def test_pipeline_stage_routes_only_in_its_layers(make_job):
    job = make_job(
        model={**MODEL, "dense_layers": 1},
        layout={"pp": 2, "dp_shard": 2, "ep": 2, "zero": 1, "micro_batch": 2, "stage_layers": [1, 1]},
    )
    first, last = ({row.axis for row in predict_traffic(job, pp_rank)} for pp_rank in (0, 1))
    assert "ep" not in first
    assert "ep" in last


def test_plan_has_expert_axes_and_the_state_of_every_rank(make_job):
    """All ranks together hold the model once. Axis names include the ranks of the experts."""
    job = make_job(model=MODEL, layout={"dp_shard": 4, "ep": 2, "zero": 3})
    plan, _ = build_plan(job)
    assert plan.reasons[0].startswith("dp_shard=4 ep=2 zero=3: given in the job")
    held = sum(rank.state_bytes["parameters"] for rank in plan.ranks)
    assert held == (DENSE + 2 * EXPERTS) * 4, "4 ranks are 2 of ep x 2 of ep_shard: every row once"
