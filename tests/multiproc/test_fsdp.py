"""ZeRO on real ranks: losses of one process, predicted bytes, checkpoints that any layout reads."""

from __future__ import annotations

import json

import pytest
from reference_runs import TEN_STEPS, ResumeChecker, max_relative_diff, reference_losses

from meshwright.plan.contract import PLAN_FILE, read_plan


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        ("dp_shard=2 zero=1", ""),
        pytest.param("dp_shard=2 zero=2 micro_batch=1 recompute=full", "", marks=pytest.mark.slow),
        pytest.param("dp_shard=2 zero=3 micro_batch=3", "", marks=pytest.mark.slow),
        pytest.param("dp_shard=3 zero=1 micro_batch=1", "", marks=pytest.mark.slow),
        pytest.param(
            "dp_shard=3 zero=2",
            "model.tied_embeddings=false train.optimizer=lion train.grad_noise=0.01",
            marks=pytest.mark.slow,
        ),
        pytest.param("dp_shard=3 zero=3 micro_batch=1 recompute=selective", "", marks=pytest.mark.slow),
        ("dp_replicate=2 dp_shard=2 zero=3 micro_batch=1", ""),
        pytest.param("dp_replicate=2 dp_shard=2 zero=1", "", marks=pytest.mark.slow),
        pytest.param("dp_shard=2 zero=3", "train.steps=1", marks=pytest.mark.slow),
    ],
)
def test_losses_equal_one_process_and_the_plan_holds(train, layout, job):
    """Ten losses within 1e-5 of one process; state and collectives equal to the byte, the peak within 5%.

    Three ranks shard 64, 128 and 320 rows unevenly: the buffers and the prediction include padding.
    """
    asked = tuple(job.split())
    sharded = train(*(f"layout.{key}" for key in layout.split()), *TEN_STEPS, *asked)
    assert max_relative_diff(sharded.losses, reference_losses(train, *asked)) < 1e-5
    result = sharded.result
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    phases = {row["phase"] for row in result["collectives"] if row["axis"] == "dp_shard"}
    assert "step" in phases
    assert all(row["calls"] > 0 for row in result["collectives"]), "a prediction without a call"


@pytest.mark.parametrize(
    ("layout", "job"),
    [
        pytest.param("dp_shard=2 zero=2 micro_batch=1 accumulate=deferred", "", marks=pytest.mark.slow),
        pytest.param(
            "dp_shard=3 zero=3 micro_batch=1 accumulate=deferred",
            "model.tied_embeddings=false",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "dp_replicate=2 dp_shard=2 zero=3 micro_batch=1 accumulate=deferred", "", marks=pytest.mark.slow
        ),
        pytest.param("dp_shard=2 zero=3 micro_batch=3 prefetch=0", "", marks=pytest.mark.slow),
        pytest.param(
            "dp_shard=3 zero=3 micro_batch=2 offload=optimizer bucket_mb=0.05", "", marks=pytest.mark.slow
        ),
        pytest.param("dp_shard=2 zero=3 micro_batch=3 offload=all", "", marks=pytest.mark.slow),
        ("dp_shard=3 zero=2 micro_batch=2 offload=all", "train.optimizer=lion"),
        pytest.param(
            "dp_shard=2 zero=3 micro_batch=2 prefetch=2", "model.num_layers=4", marks=pytest.mark.slow
        ),
        pytest.param(
            "dp_shard=2 zero=3 micro_batch=3 prefetch=9 accumulate=deferred",
            "model.num_layers=4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fsdp_settings_keep_losses_and_plan(train, layout, job):
    """Ten losses within 1e-5 of one process, state and collectives to the byte, the peak within 2%."""
    asked = tuple(job.split())
    sharded = train(*(f"layout.{key}" for key in layout.split()), *TEN_STEPS, *asked)
    assert max_relative_diff(sharded.losses, reference_losses(train, *asked)) < 1e-5
    require_contract(sharded)


def require_contract(sharded, peak=0.02):
    """State and collectives of every rank equal the plan; the peak is within a tolerance."""
    result, plan = sharded.result, read_plan(sharded.run_dir / PLAN_FILE)
    assert result["audit_ok"], result["differences"]
    assert result["state_bytes"] == result["predicted_state_bytes"]
    assert result["offloaded_bytes"] == result["predicted_offloaded_bytes"]
    assert all(row["calls"] == row["predicted_calls"] > 0 for row in result["collectives"])
    assert max_relative_diff(result["peak_memory_bytes"], [rank.peak_bytes for rank in plan.ranks]) < peak


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("dp_shard=2 zero=2 micro_batch=3", "fp16"),
        pytest.param("dp_replicate=2 dp_shard=2 zero=3 micro_batch=3", "bf16", marks=pytest.mark.slow),
    ],
)
def test_gradients_in_16_bits_halve_the_reduce_scatters(train, layout, kind):
    """Half the bytes, as predicted; the state stays float32; losses within 1e-3 of float32 gradients."""
    given = tuple(f"layout.{key}" for key in layout.split())
    exact = train(*given, *TEN_STEPS)
    rounded = train(*given, *TEN_STEPS, f"compression.kind={kind}")
    require_contract(rounded)
    assert rounded.result["state_bytes"] == exact.result["state_bytes"]
    assert 0 < max_relative_diff(rounded.losses, exact.losses) < 1e-3

    def sent(run):
        rows = run.result["collectives"]
        return next(row["bytes"] for row in rows if (row["op"], row["phase"]) == ("reduce_scatter", "step"))

    assert sent(rounded) * 2 == sent(exact)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_compiled_blocks_under_zero_have_equal_losses_and_no_extra_graphs(train, monkeypatch, zero):
    """Blocks with gathered parameters need as many graphs as without ZeRO."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:count_graphs")
    given = (
        "train.block_backend=compile",
        "train.compile_backend=aot_eager",
        "train.steps=3",
        "model.num_layers=3",
    )
    compiled = train("layout.dp_shard=2", f"layout.zero={zero}", "layout.micro_batch=3", *given)
    plain = reference_losses(train, "train.steps=3", "model.num_layers=3")
    assert max_relative_diff(compiled.losses, plain) < 1e-5
    assert compiled.result["audit_ok"], "compiled blocks need more memory than eager ones"
    lines = [json.loads(line) for line in (compiled.run_dir / "events.jsonl").read_text().splitlines()]
    graphs = [e["graphs"] for e in lines if e["event"] == "graphs"]
    assert graphs == [4, 4], "blocks and final norm, each with and without gradients"


@pytest.mark.parametrize("depth", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2])
def test_all_gathers_are_issued_prefetch_blocks_ahead(train, monkeypatch, depth):
    """When a block starts, the all-gathers of itself and of the next `prefetch` blocks have been issued."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:record_all_gathers")
    given = (f"layout.prefetch={depth}", "layout.micro_batch=6", "train.steps=1")
    trained = train("layout.dp_shard=2", "model.num_layers=4", *given)
    lines = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    issued = [e["gathers"] for e in lines if e["event"] == "gathers_so_far" and e["rank"] == 0]
    root = 1  # the all-gather of the root group
    forward = [root + min(4, block + 1 + depth) for block in range(4)]
    backward = [root + 4 + min(4, done + 1 + depth) for done in range(4)]
    assert issued == forward + backward


def test_fp16_overflow_in_one_shard_skips_the_step_on_all_ranks(train, monkeypatch):
    """Only rank 1 has a non-finite gradient. If it alone skipped the step, the shards would diverge."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:infinite_gradient_on_rank_1")
    trained = train("layout.dp_shard=2", "train.precision=fp16")
    lines = [json.loads(line) for line in (trained.run_dir / "events.jsonl").read_text().splitlines()]
    skipped = [(e["rank"], e["step"]) for e in lines if e["event"] == "step" and e["skipped"]]
    assert sorted(skipped) == [(0, 3), (1, 3)]
    assert trained.losses[-1] < trained.losses[0]


def test_checkpoints_resume_in_other_layouts(train, tmp_path):
    """FSDP resumes bit-identically; DDP resumes an FSDP checkpoint up to rounding, and the reverse."""
    runs, fsdp, ddp = ResumeChecker(train, tmp_path), ("layout.dp_shard=3",), ("layout.dp_replicate=2",)
    runs.require_bit_identical(fsdp)
    runs.require_equal_losses(fsdp, ddp)
    runs.require_equal_losses(ddp, fsdp)
