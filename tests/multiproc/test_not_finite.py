"""Values that are not finite are named, by recomputing the step with checks."""

from __future__ import annotations

import json
import socket

import pytest

from meshwright.core.events import EVENTS_FILE, read_events

DDP, ZERO3, TP, PP = "layout.dp_replicate=2", "layout.dp_shard=2", "layout.tp=2", "layout.pp=2"
WO, UP = "blocks.1.attention.wo", "blocks.1.ffn.up"


@pytest.fixture
def plant(train, tmp_path, monkeypatch):
    """``plant(kind, module, ranks, *overrides)``: the ``not_finite`` event of a run, and its error."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:plant_nan")

    def run(kind, module, ranks, *overrides, step=2):
        fault = {"kind": kind, "module": module, "ranks": ranks, "step": step}
        (tmp_path / "plant.json").write_text(json.dumps(fault))
        options = ("run_dir=run", "layout.micro_batch=2", "train.on_bad_step=stop")
        failed = train(*options, *overrides, expect=4)
        found = [e for e in read_events(failed.run_dir / EVENTS_FILE).events if e["event"] == "not_finite"]
        (error,) = failed.result["errors"]
        assert error["code"] in ("train-not-finite", "train-fp16-collapsed")
        assert found, error["message"]
        (event,) = found
        assert event["step"] == step
        return {key: event[key] for key in ("module", "what", "ranks", "weights")}, error

    return run


@pytest.mark.parametrize(
    ("layout", "module", "ranks"),
    [
        pytest.param(DDP, UP, [1], marks=pytest.mark.slow),
        pytest.param(ZERO3, UP, [0, 1], marks=pytest.mark.slow),  # both gather the shard of rank 1
        (TP, WO, [1]),  # the output is a sum over tp: the rank with the bad weight is named
        pytest.param(PP, UP, [1], marks=pytest.mark.slow),
    ],
)
def test_a_nan_in_a_weight_of_one_rank_is_named(plant, layout, module, ranks):
    found, error = plant("weight", module, [1], layout)
    assert found == {"module": module, "what": "output", "ranks": ranks, "weights": [f"{module}.weight"]}
    assert module in error["message"]
    assert ("the device of rank 1" in error["fix"]) == (layout == DDP), "other layouts have one copy"


@pytest.mark.parametrize(
    "layout",
    [DDP, *(pytest.param(one, marks=pytest.mark.slow) for one in (ZERO3, TP, PP))],
)
def test_a_nan_in_an_activation_of_one_rank_is_named(plant, layout):
    """A column-parallel linear: under tp its output is this rank's alone.

    The replicas of DDP and ZeRO have the same weights: if one is finite, the learning rate is not the cause.
    """
    found, error = plant("output", UP, [1], layout)
    assert found == {"module": UP, "what": "output", "ranks": [1], "weights": []}
    one_replica = f"Check these samples and the device of rank 1 ({socket.gethostname()})"
    assert error["fix"].startswith(one_replica if layout in (DDP, ZERO3) else "Lower train.lr")


@pytest.mark.parametrize(
    "layout",
    [
        DDP,
        ZERO3,
        TP,
        PP,
        f"{PP} layout.schedule=zb-h1",
        f"{ZERO3} layout.recompute=full",
        f"{ZERO3} layout.recompute=selective",
        "layout.cp=2",
        "layout.cp=2 layout.context=ulysses",
    ],
)
@pytest.mark.slow
def test_a_nan_in_the_gradient_of_one_rank_is_named(plant, layout):
    """The forward pass is finite. The module whose backward pass gave the NaN is named, on its rank."""
    found, _ = plant("input gradient", UP, [1], *layout.split())
    assert found == {"module": UP, "what": "input gradient", "ranks": [1], "weights": []}


@pytest.mark.parametrize(
    "options",
    [
        DDP,
        pytest.param(ZERO3, marks=pytest.mark.slow),
        pytest.param(PP, marks=pytest.mark.slow),
        pytest.param(f"{ZERO3} layout.zero=1", marks=pytest.mark.slow),
        pytest.param(f"{DDP} train.optimizer=muon", marks=pytest.mark.slow),
        pytest.param(f"{DDP} train.optimizer=sgd", marks=pytest.mark.slow),
        pytest.param(f"{DDP} layout.offload=optimizer", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("clip", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_update_that_is_not_finite_is_skipped_on_all_ranks(plant, tmp_path, options, clip):
    """One rank's gradient is NaN: no parameter, moment or step count changes, with and without clipping."""
    found, _ = plant("input gradient", UP, [1], f"train.clip={clip}", *options.split())
    assert found == {"module": UP, "what": "input gradient", "ranks": [1], "weights": []}
    events = read_events(tmp_path / "run" / EVENTS_FILE).events
    skipped = [(e["rank"], e["unchanged"]) for e in events if e["event"] == "skipped_update"]
    assert sorted(skipped) == [(0, True), (1, True)]


@pytest.mark.slow
def test_a_nan_in_compiled_blocks_is_named(plant):
    """The step is recomputed with eager blocks."""
    found, _ = plant("weight", UP, [1], DDP, "train.block_backend=compile", "train.compile_backend=aot_eager")
    assert found == {"module": UP, "what": "output", "ranks": [1], "weights": [f"{UP}.weight"]}


@pytest.mark.slow
def test_a_nan_in_the_gradient_of_a_weight_is_named(plant):
    found, _ = plant("weight gradient", UP, [1], DDP)
    assert found == {"module": UP, "what": "weight gradient", "ranks": [1], "weights": []}


@pytest.mark.slow
def test_a_nan_of_some_samples_names_the_micro_batch(plant):
    """Only micro-batches with a certain token have a NaN."""
    found, error = plant("output of some tokens", "embed", [0, 1], DDP)
    assert (found["module"], found["what"]) == ("embed", "output")
    assert "samples" in error["message"]


@pytest.mark.slow
def test_a_nan_of_an_expert_on_another_rank_is_named(plant, job_file):
    experts = ("model.num_experts=4", "model.experts_per_token=2", "layout.dp_shard=2", "layout.ep=2")
    module = "blocks.1.ffn.experts.up"
    found, _ = plant("weight", module, [1], *experts, "layout.zero=1")
    assert found == {"module": module, "what": "output", "ranks": [1], "weights": [f"{module}.weight"]}


@pytest.mark.slow
def test_a_nan_loss_under_fp16_is_not_an_overflow(plant):
    """The run ends at once, without lowering the loss scale, and bf16 is the advice."""
    found, error = plant("output", UP, [0], "train.precision=fp16", "train.loss_scale=8")
    assert (found["module"], error["code"]) == (UP, "train-not-finite")
    assert "train.precision=bf16" in error["fix"]


@pytest.mark.slow
def test_gradients_that_always_overflow_in_fp16_name_the_module(plant):
    found, error = plant("input gradient", UP, [0], "train.precision=fp16", "train.loss_scale=1", step=2)
    assert (found["module"], found["what"]) == (UP, "input gradient")
    assert error["code"] == "train-fp16-collapsed"
