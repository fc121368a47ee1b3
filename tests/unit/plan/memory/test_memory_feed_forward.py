"""Activations of an MoE layer, counted by hand: D=8, E=4, two experts per token, each 8 wide."""

from __future__ import annotations

import pytest

from meshwright.layout.parameters import list_parameters
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.build import build_plan
from meshwright.plan.memory.feed_forward import balanced_rows, row_bytes, size_experts, size_feed_forward
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.memory.snapshots import PersistentGrads, find_persistent_grads

MODEL = {
    "preset": None, "num_layers": 3, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 16,
    "vocab_size": 32, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8,
}  # fmt: skip
TOKENS, CHOICES = 64, 128
ROUTER = TOKENS * (8 + 2 * 4) * 4
"""Its input, its logits and the balance loss's gradient of them."""
ANSWERS = CHOICES * (8 * 4 + 4 + 3 * 8)
"""Per choice: the expert's output, weight, index, and its position in two orders."""
ROWS = CHOICES * (8 + 4 * 8) * 4
"""Rows, and four tensors inside the experts."""


@pytest.fixture
def job_of(make_job):
    """A job with two micro-batches of 2 x 32 tokens."""

    def job(layout=None, model=None, **train):
        return make_job(
            model={**MODEL, **(model or {})},
            layout={"micro_batch": 2, **(layout or {})},
            train={"steps": 4, "global_batch": 8, **train},
        )

    return job


@pytest.fixture
def kept(job_of):
    """Activations that the experts of one layer save."""

    def size(layout=None, model=None, rows=None, **train):
        job = job_of(layout, model, **train)
        return size_experts(job, local_model(job), 2, rows).saved

    return size


def test_experts_save_rows_outputs_and_the_router_input(kept):
    assert kept() == ROUTER + ANSWERS + ROWS
    assert kept(balance_loss=0.0) == ROUTER - TOKENS * 4 * 4 + ANSWERS + ROWS
    assert kept(model={"activation": "gelu"}) == ROUTER + ANSWERS + CHOICES * (8 + 2 * 8) * 4
    assert kept(model={"router": "sigmoid"}) == ROUTER + ANSWERS + ROWS + TOKENS * (2 + 1) * 4


def test_exchanged_rows_save_their_order_twice(kept):
    assert kept({"dp_shard": 2, "ep": 2, "zero": 1}) == ROUTER + ANSWERS + ROWS + CHOICES * 16


def test_etp_ranks_each_save_the_row_and_half_of_the_inner_activations(kept):
    halves = 2 * CHOICES * ((8 + 4 * 4) * 4 + 16)
    assert kept({"dp_shard": 2, "etp": 2, "zero": 1}) == ROUTER + ANSWERS + halves


def test_each_tp_rank_routes_its_own_tokens(kept):
    assert kept({"tp": 2}) == (ROUTER + ANSWERS + ROWS) // 2
    whole = TOKENS * (8 + 4 * 4) * 4
    assert kept({"tp": 2}, {"shared_experts": 1}) == (ROUTER + ANSWERS + ROWS) // 2 + whole


def test_shared_experts_read_the_router_input(kept):
    assert kept(model={"shared_experts": 1}) == ROUTER + ANSWERS + ROWS + TOKENS * 4 * 8 * 4


def test_tokens_dropped_by_a_capacity_are_not_read(kept):
    """Half of the capacity is 2 x 4 experts x 8 rows. The output of a dropped token is zero and is saved."""
    assert kept(model={"capacity_factor": 0.5}) == ROUTER + ANSWERS + ROWS // 2


def test_unreplicated_expert_gradients_are_allocated_in_backward(job_of):
    """With ZeRO-1 and one micro-batch, dense gradients are in buckets from the start.

    Expert gradients are not.
    """
    alone = job_of({"dp_shard": 2, "ep": 2, "zero": 1}, global_batch=4)
    assert find_persistent_grads(alone) == PersistentGrads(dense=True, experts=False)
    assert find_persistent_grads(alone, micro_batches=2) == PersistentGrads(dense=True, experts=True)
    assert find_persistent_grads(job_of({"tp": 2})) == PersistentGrads(dense=False, experts=True)
    assert find_persistent_grads(job_of({"dp_shard": 2, "ep": 2, "zero": 3})) == PersistentGrads()
    model, lines = local_model(alone), {line.name: line.bytes for line in predict_ledger(alone, 2, 1).lines}
    experts = 3 * 2 * 8 * 8 * 4
    everything = sum(p.count for p in list_parameters(model)) * 4
    assert lines["gradients at peak"] in [everything - layers * experts for layers in range(4)]


def test_in_bf16_the_router_reads_float32_and_experts_read_weight_copies(kept):
    answers, rows = CHOICES * (8 * 2 + 4 + 2 + 3 * 8), CHOICES * (8 + 4 * 8) * 2
    copies = 3 * 4 * 8 * 8 * 2
    assert kept(precision="bf16") == ROUTER + answers + rows + copies
    assert kept({"dp_shard": 2, "zero": 3}, precision="bf16") == ROUTER + answers + rows + 4 * 8 * 4


def test_bytes_per_routed_row_match_the_plan(job_of, kept):
    """The contract has the bytes per row. Full activation checkpointing saves none."""
    job = job_of({"dp_shard": 2, "ep": 2, "zero": 1})
    assert row_bytes(job, local_model(job)) == (8 + 4 * 8) * 4 + 16
    assert kept({"dp_shard": 2, "ep": 2, "zero": 1}, rows=CHOICES + 5) - kept(
        {"dp_shard": 2, "ep": 2, "zero": 1}
    ) == 5 * row_bytes(job, local_model(job))
    for recompute, each in (("none", 176), ("selective", (8 + 2 * 8) * 4), ("full", 0)):
        layout = {"dp_shard": 2, "ep": 2, "zero": 1, "recompute": recompute}
        planned = build_plan(job_of(layout))[0].ranks[1]
        assert (planned.routed_rows, planned.row_bytes) == (CHOICES, each)


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "zero": 3}, {"pp": 2, "stage_layers": [2, 1]}, {"recompute": "selective"}],
    ids=str,
)
def test_the_ledger_of_measured_rows_differs_by_their_activations(job_of, layout):
    """Each layer has its own row count. A pipeline rank has two of the three layers."""
    job = job_of(layout)
    model = local_model(job)
    layers = 2 if job.layout.pp == 2 else 3
    even = predict_ledger(job, 2, 2)
    share = balanced_rows(job, model, 2)
    same = predict_ledger(job, 2, 2, rows=[share] * layers)
    assert (same.activation_bytes, same.peak_bytes) == (even.activation_bytes, even.peak_bytes)
    more = predict_ledger(job, 2, 2, rows=[share + 10, *[share] * (layers - 1)])
    assert more.activation_bytes - even.activation_bytes == 10 * row_bytes(job, model)
    assert more.peak_bytes > even.peak_bytes


def test_dense_layers_of_a_moe_model_save_as_much_as_in_a_dense_model(job_of):
    mixed, all_routed = job_of(model={"dense_layers": 1}), job_of()
    dense = size_feed_forward(mixed, local_model(mixed), 2)
    assert dense.saved == TOKENS * (8 + 4 * 16) * 4
    difference = (
        predict_ledger(all_routed, 2, 2).activation_bytes - predict_ledger(mixed, 2, 2).activation_bytes
    )
    assert difference == ROUTER + ANSWERS + ROWS - dense.saved
