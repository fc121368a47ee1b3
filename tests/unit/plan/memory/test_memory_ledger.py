"""The ledger and the traffic: exact state, growing peaks, compressed bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.layout.parameters import count_parameters, list_parameters
from meshwright.plan.memory.ledger import predict_ledger
from meshwright.plan.traffic.predict import predict_traffic

PRESETS = ("tiny", "demo-2m", "llama3.2-1b", "llama3-8b")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_is_p_plus_g_plus_two_moments_and_a_step_count_per_tensor(make_job, preset, ranks):
    job = make_job(model={"preset": preset}, layout={"dp_replicate": ranks})
    count, tensors = count_parameters(job.model), len(list_parameters(job.model))
    assert predict_ledger(job, 1, 1).state_bytes == {
        "parameters": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count + 4 * tensors,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_is_the_same_in_every_precision_and_micro_batch(make_job, precision):
    job = make_job(train={"precision": precision})
    assert predict_ledger(job, 4, 2).state_bytes == predict_ledger(make_job(), 1, 8).state_bytes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_lines_of_the_ledger_add_up_to_the_peak(make_job, ranks, micro_batches):
    ledger = predict_ledger(make_job(layout={"dp_replicate": ranks}), 2, micro_batches)
    assert sum(line.bytes for line in ledger.lines) == ledger.peak_bytes
    assert all(line.formula and line.bytes >= 0 for line in ledger.lines)
    assert ledger.peak_at in " ".join(line.formula for line in ledger.lines)


@pytest.mark.parametrize(("ranks", "micro_batches", "twice"), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 1)])
def test_only_ddp_with_accumulation_holds_gradients_twice_in_the_first_step(
    make_job, ranks, micro_batches, twice
):
    ledger = predict_ledger(make_job(layout={"dp_replicate": ranks}), 2, micro_batches)
    assert ledger.first_peak_bytes - ledger.peak_bytes == twice * ledger.state_bytes["gradients"]


@settings(max_examples=60, deadline=None)
@given(
    micro=st.integers(1, 64),
    ranks=st.sampled_from([1, 4]),
    micro_batches=st.sampled_from([1, 2]),
    precision=st.sampled_from(["fp32", "bf16"]),
    preset=st.sampled_from(PRESETS),
)
def test_the_peak_grows_with_the_micro_batch(make_job, micro, ranks, micro_batches, precision, preset):
    job = make_job(model={"preset": preset}, layout={"dp_replicate": ranks}, train={"precision": precision})
    less, more = (predict_ledger(job, m, micro_batches) for m in (micro, micro + 1))
    assert less.peak_bytes < more.peak_bytes
    assert less.first_peak_bytes < more.first_peak_bytes


@pytest.mark.parametrize(("ranks", "micro_batches", "held"), [(1, 1, 0), (1, 2, 1), (2, 1, 1), (2, 2, 1)])
def test_gradients_live_at_the_loss_only_if_ddp_or_accumulation_keeps_them(
    make_job, ranks, micro_batches, held
):
    ledger = predict_ledger(make_job(layout={"dp_replicate": ranks}), 8, micro_batches)
    assert ledger.peak_at == "loss, forward"
    (gradients,) = [line.bytes for line in ledger.lines if line.name.startswith("gradients")]
    assert gradients == held * ledger.state_bytes["gradients"]


def test_the_peak_holds_the_state_at_least(make_job):
    for micro_batches in (1, 2):
        ledger = predict_ledger(make_job(layout={"dp_replicate": 2}), 1, micro_batches)
        assert ledger.peak_bytes >= sum(ledger.state_bytes.values())


def test_bf16_saves_smaller_activations_once_tokens_outweigh_weights(make_job):
    full, half = (predict_ledger(make_job(train={"precision": p}), 64, 1) for p in ("fp32", "bf16"))
    assert half.peak_bytes < full.peak_bytes


@pytest.mark.parametrize(("bucket_mb", "sent"), [(25.0, 0), (0.1, 1)])
def test_a_compressed_copy_is_live_only_once_its_bucket_is_ready(make_job, bucket_mb, sent):
    """A single bucket is ready after backward. Small buckets are ready while activations are live."""
    wide = {"ffn_size": 512, "vocab_size": 64, "num_layers": 4, "tied_embeddings": False}
    layout = {"dp_replicate": 2, "recompute": "full", "bucket_mb": bucket_mb}
    plain, less = (
        predict_ledger(make_job(model=wide, layout=layout, compression={"kind": kind}), 2, 1)
        for kind in ("none", "bf16")
    )
    assert plain.peak_at.startswith("block")
    largest = 2 * wide["ffn_size"] * make_job(model=wide).model.hidden_size
    assert bool(sent) == (less.peak_bytes > plain.peak_bytes)
    assert less.peak_bytes <= plain.peak_bytes + largest


# Traffic


def test_one_process_has_no_traffic(make_job):
    assert predict_traffic(make_job(layout={"dp_replicate": 1})) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ddp_reduces_every_gradient_once_per_step(make_job, ranks):
    job = make_job(layout={"dp_replicate": ranks, "bucket_mb": 0.1})
    rows = {(t.axis, t.op, t.phase): t for t in predict_traffic(job)}
    gradients = rows["dp_replicate", "all_reduce", "step"]
    assert (gradients.ranks, gradients.calls, gradients.bytes) == (ranks, 3, 4 * 94_528)
    assert (rows["control", "all_reduce", "step"].calls, rows["control", "all_reduce", "step"].bytes) == (
        1,
        40,
    )
    assert (rows["control", "all_reduce", "eval"].calls, rows["control", "all_reduce", "eval"].bytes) == (
        1,
        16,
    )
    setup = rows["dp_replicate", "broadcast", "setup"]
    assert (setup.calls, setup.bytes) == (2, 4 * (20 + 1 + 3)), "indices of 20 tensors, a count, 3 sizes"
    assert len(rows) == 4


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_compression_halves_the_bytes_and_keeps_the_calls(make_job, kind):
    def gradients(compression):
        job = make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}, compression={"kind": compression})
        return next(t for t in predict_traffic(job) if (t.axis, t.phase) == ("dp_replicate", "step"))

    assert 2 * gradients(kind).bytes == gradients("none").bytes
    assert gradients(kind).calls == gradients("none").calls


def test_smaller_buckets_mean_more_calls_and_the_same_bytes(make_job):
    def step(bucket_mb):
        job = make_job(layout={"dp_replicate": 2, "bucket_mb": bucket_mb})
        return next(t for t in predict_traffic(job) if (t.axis, t.phase) == ("dp_replicate", "step"))

    fine, coarse = step(1e-6), step(25.0)
    assert (fine.calls, coarse.calls) == (20, 1)
    assert fine.bytes == coarse.bytes
