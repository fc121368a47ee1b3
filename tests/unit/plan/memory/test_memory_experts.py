"""What a layer with experts keeps, counted by hand: D=8, E=4, two experts a token, each 8 wide."""

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
"""Each expert's answer, weight, number, and its place in two orders."""
ROWS = CHOICES * (8 + 4 * 8) * 4
"""Rows, and four tensors inside the experts."""


@pytest.fixture
def job_of(make_job):
    """Micro-batches of 2 x 32 tokens, two of them."""

    def job(layout=None, model=None, **train):
        return make_job(
            model={**MODEL, **(model or {})},
            layout={"micro_batch": 2, **(layout or {})},
            train={"steps": 4, "global_batch": 8, **train},
        )

    return job


@pytest.fixture
def kept(job_of):
    """What one layer's experts keep."""

    def size(layout=None, model=None, rows=None, **train):
        job = job_of(layout, model, **train)
        return size_experts(job, local_model(job), 2, rows).saved

    return size


def test_experts_keep_rows_answers_and_what_the_router_read(kept):
    assert kept() == ROUTER + ANSWERS + ROWS
    assert kept(balance_loss=0.0) == ROUTER - TOKENS * 4 * 4 + ANSWERS + ROWS
    assert kept(model={"activation": "gelu"}) == ROUTER + ANSWERS + CHOICES * (8 + 2 * 8) * 4
    assert kept(model={"router": "sigmoid"}) == ROUTER + ANSWERS + ROWS + TOKENS * (2 + 1) * 4


def test_rows_that_travel_keep_their_order_twice(kept):
    assert kept({"dp_shard": 2, "ep": 2, "zero": 1}) == ROUTER + ANSWERS + ROWS + CHOICES * 16


def test_ranks_that_share_an_expert_each_keep_the_row_and_half_of_its_inside(kept):
    halves = 2 * CHOICES * ((8 + 4 * 4) * 4 + 16)
    assert kept({"dp_shard": 2, "etp": 2, "zero": 1}) == ROUTER + ANSWERS + halves


def test_each_rank_of_tp_routes_its_own_tokens(kept):
    assert kept({"tp": 2}) == (ROUTER + ANSWERS + ROWS) // 2
    whole = TOKENS * (8 + 4 * 4) * 4
    assert kept({"tp": 2}, {"shared_experts": 1}) == (ROUTER + ANSWERS + ROWS) // 2 + whole


def test_shared_experts_read_what_the_router_reads(kept):
    assert kept(model={"shared_experts": 1}) == ROUTER + ANSWERS + ROWS + TOKENS * 4 * 8 * 4


def test_what_a_capacity_drops_is_not_read(kept):
    """Half of the places: 2 x 4 experts x 8 rows; its answer is zero, and is kept."""
    assert kept(model={"capacity_factor": 0.5}) == ROUTER + ANSWERS + ROWS // 2


def test_gradients_of_experts_that_no_other_rank_holds_come_with_the_backward_pass(job_of):
    """One micro-batch, ZeRO-1: what is dense lies in buckets from the start, experts' gradients do not."""
    alone = job_of({"dp_shard": 2, "ep": 2, "zero": 1}, global_batch=4)
    assert find_persistent_grads(alone) == PersistentGrads(dense=True, experts=False)
    assert find_persistent_grads(alone, micro_batches=2) == PersistentGrads(dense=True, experts=True)
    assert find_persistent_grads(job_of({"tp": 2})) == PersistentGrads(dense=False, experts=True)
    assert find_persistent_grads(job_of({"dp_shard": 2, "ep": 2, "zero": 3})) == PersistentGrads()
    model, lines = local_model(alone), {line.name: line.bytes for line in predict_ledger(alone, 2, 1).lines}
    experts = 3 * 2 * 8 * 8 * 4
    everything = sum(p.count for p in list_parameters(model)) * 4
    assert lines["gradients at peak"] in [everything - layers * experts for layers in range(4)]


def test_in_16_bits_the_router_still_reads_float32_and_experts_copies(kept):
    answers, rows = CHOICES * (8 * 2 + 4 + 2 + 3 * 8), CHOICES * (8 + 4 * 8) * 2
    copies = 3 * 4 * 8 * 8 * 2
    assert kept(precision="bf16") == ROUTER + answers + rows + copies
    assert kept({"dp_shard": 2, "zero": 3}, precision="bf16") == ROUTER + answers + rows + 4 * 8 * 4


def test_a_row_more_keeps_what_the_plan_says(job_of, kept):
    """Row by row, and in the contract; nothing is kept of it where it is all computed again."""
    job = job_of({"dp_shard": 2, "ep": 2, "zero": 1})
    assert row_bytes(job, local_model(job)) == (8 + 4 * 8) * 4 + 16
    assert kept({"dp_shard": 2, "ep": 2, "zero": 1}, rows=CHOICES + 5) - kept(
        {"dp_shard": 2, "ep": 2, "zero": 1}
    ) == 5 * row_bytes(job, local_model(job))
    for recompute, each in (("none", 176), ("selective", (8 + 2 * 8) * 4), ("full", 0)):
        layout = {"dp_shard": 2, "ep": 2, "zero": 1, "recompute": recompute}
        promised = build_plan(job_of(layout))[0].ranks[1]
        assert (promised.routed_rows, promised.row_bytes) == (CHOICES, each)


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "zero": 3}, {"pp": 2, "stage_layers": [2, 1]}, {"recompute": "selective"}],
    ids=str,
)
def test_the_ledger_of_rows_that_came_differs_by_what_they_keep(job_of, layout):
    """Of each layer its own: a pipeline's rank has two of the three."""
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


def test_dense_layers_keep_what_dense_layers_do(job_of):
    mixed, all_routed = job_of(model={"dense_layers": 1}), job_of()
    dense = size_feed_forward(mixed, local_model(mixed), 2)
    assert dense.saved == TOKENS * (8 + 4 * 16) * 4
    difference = (
        predict_ledger(all_routed, 2, 2).activation_bytes - predict_ledger(mixed, 2, 2).activation_bytes
    )
    assert difference == ROUTER + ANSWERS + ROWS - dense.saved
