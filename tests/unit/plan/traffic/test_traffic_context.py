"""Collectives and memory of context parallel, counted by hand."""

from __future__ import annotations

import pytest

from meshwright.layout.fsdp_groups import sharded_state_bytes
from meshwright.plan.build import build_plan
from meshwright.plan.predict import predict
from meshwright.plan.traffic.predict import predict_traffic

MODEL = {
    "preset": None, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 16,
    "vocab_size": 32,
}  # fmt: skip
PARAMETERS = 256 + 2 * (8 + 64 + 32 + 32 + 64 + 8 + 3 * 128) + 8 + 256
"""Embedding, two blocks (norm, queries, keys, values, output, norm, feed-forward), norm, head: 1704 in 21."""


@pytest.fixture
def rows_of(make_job):
    """Calls and bytes by axis, op and phase of a small decoder with micro-batches of 2 x 32 tokens."""

    def rows(layout, data=None, **tables):
        job = make_job(
            model=MODEL,
            layout={"micro_batch": 2, **layout},
            train={"steps": 4, "global_batch": 8, "eval_samples": 4, **tables},
            data={"seq_len": 32, **(data or {})},
        )
        return {(row.axis, row.op, row.phase): (row.calls, row.bytes) for row in predict_traffic(job)}

    return rows


def test_ring_attention_sends_keys_and_values_to_the_next_rank(rows_of):
    """Two ranks, 4 micro-batches, 2 blocks, 32 tokens per rank: keys and values have 2 x 32 x 4 x 4 bytes.

    Keys and values are sent once in forward and once in backward, their gradients once. Each is two sends,
    one per head chunk.
    """
    rows = rows_of({"cp": 2})
    assert rows["cp", "send", "step"] == (4 * 2 * 3 * 2, 4 * 2 * 3 * 1024)
    assert rows["cp", "send", "eval"] == (2 * 2 * 2, 2 * 2 * 1024)
    assert rows["cp", "send", "setup"] == (1, 4)


def test_ring_gradients_are_sent_in_float32_and_keys_in_bf16(rows_of):
    """Four ranks have 3 hops of 512 bytes in 16 bits, forward and backward.

    Gradients have 3 hops in 32 bits.
    """
    rows = rows_of({"cp": 4}, precision="bf16")
    each = 2 * 16 * 4
    assert rows["cp", "send", "step"] == (8 * (6 + 3) * 2, 8 * (6 * each * 2 + 3 * each * 4))


@pytest.mark.parametrize(("recompute", "hops"), [("none", 3), ("selective", 3), ("full", 4)])
def test_the_ring_is_repeated_if_attention_is_recomputed(rows_of, recompute, hops):
    assert rows_of({"cp": 2, "recompute": recompute})["cp", "send", "step"][0] == 8 * hops * 2


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("selective", 3), ("full", 3)])
def test_ulysses_has_two_all_to_alls_per_pass(rows_of, recompute, passes):
    """32 tokens x (8 query + 2 x 4 key and value) elements, then x 8 output elements, 4 bytes each.

    There are no sends.
    """
    rows = rows_of({"cp": 2, "context": "ulysses", "recompute": recompute})
    assert rows["cp", "all_to_all", "step"] == (2 * 8 * passes, 8 * passes * 32 * (16 + 8) * 4)
    assert rows["cp", "all_to_all", "eval"] == (2 * 4, 4 * 32 * (16 + 8) * 4)
    assert not any(op == "send" for _, op, _ in rows)


def test_ulysses_repeats_key_heads_if_they_are_fewer_than_ranks(rows_of):
    """Two key heads of width 2 on four ranks are sent as four."""
    rows = rows_of({"cp": 4, "context": "ulysses"})
    assert rows["cp", "all_to_all", "step"] == (2 * 8 * 2, 8 * 2 * 16 * (16 + 2 * 4 * 2) * 4)


def test_cp_ranks_all_reduce_gradients_like_replicas(rows_of):
    """21 tensors are in one bucket."""
    rows = rows_of({"cp": 2})
    assert rows["cp", "all_reduce", "step"] == (1, PARAMETERS * 4)
    assert rows["cp", "broadcast", "setup"] == (2, (21 + 1 + 1) * 4)
    assert rows["control", "all_reduce", "step"] == (1, 5 * 8)
    rows = rows_of({"dp_replicate": 2, "cp": 2})
    assert rows["dp_replicate+cp", "all_reduce", "step"] == (1, PARAMETERS * 4)


def test_zero_shards_the_state_over_dp_shard_and_cp(rows_of, make_job):
    """ZeRO-1 shards over dp_shard x cp = 4. Two data ranks have 2 micro-batches of the 8 samples."""
    rows = rows_of({"dp_shard": 2, "cp": 2, "zero": 1})
    assert rows["dp_shard+cp", "all_reduce", "step"] == (1, PARAMETERS * 4)
    assert rows["dp_shard+cp", "all_gather", "step"] == (1, PARAMETERS * 4)
    rows = rows_of({"dp_replicate": 2, "cp": 2, "zero": 1})
    assert rows["dp_replicate+cp", "all_reduce", "step"] == (1, PARAMETERS * 4)
    assert rows["cp", "all_gather", "step"] == (1, PARAMETERS * 4)
    layout = {"dp_shard": 2, "cp": 2, "zero": 3, "micro_batch": 2}
    assert sharded_state_bytes(make_job(model=MODEL, layout=layout), 1)["parameters"] == PARAMETERS


def test_tp_and_pp_move_only_the_tokens_of_a_cp_rank(rows_of):
    """A cp rank has half of the tokens, so tp all-reduces and pp sends have half of the bytes."""
    for layout in ({"tp": 2}, {"pp": 2, "stage_layers": [1, 1]}):
        alone, shared = rows_of(layout), rows_of({**layout, "cp": 2})
        axis, op = ("tp", "all_reduce") if "tp" in layout else ("pp", "send")
        for phase in ("step", "eval"):
            assert shared[axis, op, phase][1] * 2 == alone[axis, op, phase][1]
            assert shared[axis, op, phase][0] == alone[axis, op, phase][0]
    one = rows_of({"tp": 2, "cp": 2})["cp", "send", "step"]
    assert one == (24, 24 * 512), "a tp rank has one of two key heads, so one chunk"


def test_cp_divides_the_memory_of_activations(make_job):
    """The activations of a block are half, and RoPE tables cover the positions of the rank.

    There are as many key heads as query heads, so that one process repeats none.
    """
    model = {**MODEL, "num_kv_heads": 4}
    alone, shared = (
        predict(job, job.layout).ledger
        for job in (make_job(model=model, layout={"cp": cp, "micro_batch": 2}) for cp in (1, 2))
    )
    tables = [
        next(line.bytes for line in ledger.lines if line.name == "RoPE tables") for ledger in (alone, shared)
    ]
    assert tables == [2 * 32 * 2 * 4, 2 * 16 * 2 * 4]
    head = 32 * 8 * 4
    assert (alone.activation_bytes - head) == 2 * (shared.activation_bytes - head)
    assert alone.touched_bytes == 2 * shared.touched_bytes


def test_ulysses_saves_the_attention_output_twice_and_repeated_key_heads(make_job):
    """2 blocks with 2 x 8 tokens per rank save 8 more elements per token.

    Repeated key heads add 2 x (8 - 4).
    """
    kept = {}
    for context in ("ring", "ulysses"):
        job = make_job(
            model=MODEL,
            layout={"cp": 4, "context": context, "micro_batch": 2},
            cluster={"preset": "local", "device": "cpu"},
        )
        kept[context] = predict(job, job.layout).ledger.activation_bytes
    assert kept["ulysses"] - kept["ring"] == 2 * (2 * 8) * (8 + 2 * 4) * 4


@pytest.mark.parametrize(("context", "masks"), [("ring", 0), ("ulysses", 2 * 32 * 32 * 4)])
def test_ring_attention_saves_no_document_mask(make_job, context, masks):
    """Document numbers of whole sequences are kept instead: 2 x 16 x 2 + 2 x 32 numbers."""
    job = make_job(
        model=MODEL,
        layout={"cp": 2, "context": context, "micro_batch": 2},
        data={"path": "text", "seq_len": 32, "mask": "document"},
    )
    lines = {line.name: line.bytes for line in predict(job, job.layout).ledger.lines}
    assert lines.get("document mask", 0) == masks
    assert lines["batch"] == (2 * 32 + 2 * 32) * 8


def test_a_plan_names_the_cp_axis(make_job):
    plan, _ = build_plan(make_job(model=MODEL, layout={"dp_shard": 2, "cp": 2, "zero": 3}))
    assert plan.reasons[0].startswith("dp_shard=2 cp=2 zero=3 ring: given in the job")
    assert plan.world_size == 4
    assert {rank.state_bytes["parameters"] for rank in plan.ranks} == {PARAMETERS}
