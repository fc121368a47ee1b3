"""Precision, recomputation and compilation on real ranks: the curve stays, the plan holds."""

from __future__ import annotations

import pytest

from model_shapes import gpt_overrides

REPLICATED = "layout.dp_replicate=2"


@pytest.mark.slow
def test_bf16_and_fp16_follow_the_float32_curve_for_200_steps(train):
    """The mean difference over 200 steps is below 1% of the loss, and the end is no worse than 3%."""
    long = ("train.steps=200", "train.eval_every=0", "train.lr=2e-3")
    exact = train("run_dir=fp32", *long).losses
    assert exact[-1] < 0.6 * exact[0], "it learns something, or any curve would be near"
    for precision in ("bf16", "fp16"):
        found = train(f"run_dir={precision}", *long, f"train.precision={precision}").losses
        differences = [abs(a - b) / b for a, b in zip(found, exact, strict=True)]
        assert sum(differences) / len(differences) < 0.01, precision
        assert abs(found[-1] - exact[-1]) / exact[-1] < 0.03, precision
        assert found != exact, f"{precision} was not used"


def test_an_fp16_step_that_overflows_is_skipped_by_all_ranks_and_resumed_alike(train, job_file):
    """A first scale that must overflow: steps are skipped, then it learns; a resumed run is equal."""
    scale = ("train.precision=fp16", "train.loss_scale=1e9", "train.steps=24", "train.lr=2e-3", REPLICATED)
    whole = train("run_dir=whole", *scale)
    events = [e for e in read(whole.run_dir) if e["event"] == "step"]
    skipped = {e["step"] for e in events if e["skipped"]}
    assert skipped, "nothing overflowed"
    assert {(e["step"], e["skipped"]) for e in events if e["rank"] == 0} == {
        (e["step"], e["skipped"]) for e in events if e["rank"] == 1
    }
    assert whole.losses[-1] < whole.losses[0]
    train("run_dir=part", *scale, "train.steps=2", "train.schedule=constant")
    first = train("run_dir=again", *scale, "train.schedule=constant")
    rest = train("run_dir=part", *scale, "train.schedule=constant", resume=True)
    assert rest.losses == first.losses[2:], "the scale goes on where it was"


def test_fp16_that_diverges_says_at_which_step_the_scale_collapsed(train):
    options = ("train.precision=fp16", "train.lr=1000", "train.clip=0", "train.steps=60", "train.warmup=0")
    failed = train(*options, expect=4)
    (error,) = failed.result["errors"]
    assert error["code"] == "train-fp16-collapsed"
    assert "collapsed at step" in error["message"]


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_on_two_ranks_changes_no_bit_and_the_ledger_knows(train, recompute):
    plain = train("run_dir=plain", REPLICATED, "model.num_layers=4")
    saved = train("run_dir=saved", REPLICATED, "model.num_layers=4", f"layout.recompute={recompute}")
    assert saved.losses == plain.losses
    assert saved.result["audit_ok"]
    assert saved.result["peak_memory_bytes"][0] < plain.result["peak_memory_bytes"][0]


@pytest.mark.parametrize(
    "options",
    [
        ("layout.recompute=full", "compression.kind=bf16", "layout.micro_batch=1", "train.steps=2"),
        ("compression.kind=fp16", "layout.bucket_mb=0.05", "layout.micro_batch=2", "train.steps=2"),
        ("model.vocab_size=2048", "train.global_batch=3", "layout.micro_batch=1", "train.steps=1"),
        ("model.vocab_size=2048", "layout.micro_batch=1", "layout.recompute=full", "train.steps=1"),
        ("model.tied_embeddings=false", "layout.micro_batch=3", "train.steps=1", "compression.kind=bf16"),
    ],
    ids=str,
)
def test_the_ledger_knows_compressed_copies_and_the_first_step(train, options):
    """A first step holds gradients beside DDP's buckets; a copy is sent when its bucket is complete."""
    result = train(REPLICATED, *options).result
    predicted, measured = result["predicted_peak_memory_bytes"][0], result["peak_memory_bytes"][0]
    assert measured == pytest.approx(predicted, rel=0.01)


def test_compiled_blocks_on_two_ranks_give_the_same_losses_and_say_compiled(train):
    plain = train("run_dir=plain", REPLICATED)
    compiled = train(
        "run_dir=compiled",
        REPLICATED,
        "train.block_backend=compile",
        "train.compile_backend=aot_eager",
        "layout.bucket_mb=0.1",  # smaller than the first bucket that torch's compiler expects of DDP
    )
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert compiled.result["peak_memory_bytes"] == [None, None]
    assert compiled.result["audit_ok"]
    assert "compiled, not audited" in compiled.messages
    assert "leaked" not in compiled.messages


@pytest.mark.slow
@pytest.mark.parametrize("layout", [REPLICATED, "layout.dp_shard=2"])
def test_fp8_on_two_ranks_stays_near_bf16_and_its_state_is_audited(train, layout):
    """fp8 GEMMs on weight copies, and of what ZeRO-3 gathers; the optimizer's state stays float32."""
    layout = (layout, "model.num_heads=8", "model.num_kv_heads=4")
    near = train("run_dir=bf16", *layout, "train.precision=bf16").losses
    compiled = (
        "train.block_backend=compile",
        "train.compile_backend=aot_eager",
        "layout.recompute=selective",
    )
    found = train("run_dir=fp8", *layout, "train.precision=fp8", *compiled)
    assert found.losses == pytest.approx(near, rel=0.01)
    assert found.losses != near, "fp8 was not used"
    assert found.result["audit_ok"]
    assert "compiled, not audited" in found.messages


@pytest.mark.slow
def test_fp8_follows_the_bf16_curve_for_200_steps(train):
    """The mean over the curve is within 0.5% of the loss of bf16, of three seeds the last 50 steps within 1%.

    Single runs part, as all do that round differently: the last 50 steps of one are 1.1% above.
    """
    long = (
        "train.steps=200",
        "train.eval_every=0",
        "train.lr=1e-3",
        "model.num_heads=8",
        "model.num_kv_heads=4",
        "train.block_backend=compile",
        "train.compile_backend=aot_eager",
    )
    ratios = []
    for seed in range(3):
        exact, found = (
            train(
                f"run_dir={precision}-{seed}", *long, f"train.precision={precision}", f"train.seed={seed}"
            ).losses
            for precision in ("bf16", "fp8")
        )
        assert exact[-1] < 0.6 * exact[0], "it learns something, or any curve would be near"
        assert found != exact, "fp8 was not used"
        assert sum(found) == pytest.approx(sum(exact), rel=0.005)
        ratios.append(sum(found[-50:]) / sum(exact[-50:]))
    assert sum(ratios) / 3 == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_copies_and_a_stream_in_16_bits_follow_the_plain_curve(train):
    """GEMMs read bf16 weight copies and a bf16 residual stream: two ranks stay within bf16 rounding."""
    low = ("train.precision=bf16", "model.num_heads=8", "model.num_kv_heads=4")
    plain = train("run_dir=plain", REPLICATED, *low)
    compiled = ("train.block_backend=compile", "train.compile_backend=aot_eager", "train.residual_dtype=bf16")
    copied = train("run_dir=copied", REPLICATED, *low, *compiled)
    assert copied.losses == pytest.approx(plain.losses, rel=2e-3)
    assert copied.losses != pytest.approx(plain.losses, rel=1e-7)
    assert copied.result["audit_ok"]


def test_gpt_shaped_models_train_on_two_ranks_like_in_one_process(train):
    gpt = gpt_overrides(max_positions=32)
    alone = train("run_dir=alone", *gpt)
    together = train("run_dir=together", *gpt, REPLICATED)
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    assert together.result["audit_ok"]


def read(run_dir):
    from meshwright.core.events import EVENTS_FILE, read_events

    return read_events(run_dir / EVENTS_FILE).events
