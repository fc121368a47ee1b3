"""Bad steps on several ranks: all of them skip alike, roll back or stop; replicas that differ are named."""

from __future__ import annotations

import json

import pytest

from meshwright.core.events import EVENTS_FILE, read_events

DDP, ZERO3, TP, PP = "layout.dp_replicate=2", "layout.dp_shard=2", "layout.tp=2", "layout.pp=2"
UP, WO = "blocks.1.ffn.up", "blocks.1.attention.wo"
EXPERTS = "layout.ep=2 layout.zero=1 model.num_experts=4 model.experts_per_token=2 train.balance_rate=0.1"
NAN, SPIKE = "input gradient", "spike in the input gradient"


@pytest.fixture
def plant(train, tmp_path, monkeypatch):
    """``plant(kind, step, *overrides)``: a run of 12 steps with a fault in one step, and its events."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:plant_nan")

    def run(kind, step, *overrides, rank=1, generations=(0, 1), **options):
        module = WO if EXPERTS.split(maxsplit=1)[0] in overrides else UP
        fault = {"kind": kind, "module": module, "ranks": [rank], "step": step, "generations": generations}
        (tmp_path / "plant.json").write_text(json.dumps(fault | {"once": True}))
        trained = train("run_dir=run", "layout.micro_batch=2", "train.steps=12", *overrides, **options)
        return trained, read_events(trained.run_dir / EVENTS_FILE).events

    return run


def of(events, name):
    return [event for event in events if event["event"] == name]


@pytest.mark.parametrize(
    ("layout", "kind", "step"),
    [
        pytest.param(DDP, SPIKE, 10, marks=pytest.mark.slow),
        (ZERO3, NAN, 3),
        pytest.param("layout.dp_replicate=1", NAN, 3, marks=pytest.mark.slow),
        pytest.param(DDP, NAN, 3, marks=pytest.mark.slow),
        pytest.param(ZERO3, SPIKE, 10, marks=pytest.mark.slow),
        pytest.param(f"{ZERO3} layout.zero=1", SPIKE, 10, marks=pytest.mark.slow),
        pytest.param(TP, NAN, 3, marks=pytest.mark.slow),
        pytest.param(TP, "spike in the weight gradient", 10, marks=pytest.mark.slow),
        pytest.param(PP, NAN, 3, marks=pytest.mark.slow),
        pytest.param(PP, "spike in the weight gradient", 10, marks=pytest.mark.slow),
        pytest.param(f"{DDP} train.precision=fp16 train.loss_scale=8", SPIKE, 10, marks=pytest.mark.slow),
        pytest.param(f"{DDP} train.optimizer=muon", SPIKE, 10, marks=pytest.mark.slow),
        pytest.param(f"{DDP} layout.offload=optimizer", SPIKE, 10, marks=pytest.mark.slow),
        pytest.param(f"{ZERO3} {EXPERTS}", "weight gradient", 3, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_skip_a_bad_step_alike(plant, layout, kind, step):
    """Reliability test 20: no rank changes its state, the rank is named, the audit is clean."""
    ranks = 1 if layout == "layout.dp_replicate=1" else 2
    run, events = plant(kind, step, *layout.split(), rank=ranks - 1)
    skipped = [(e["rank"], e["step"], e["unchanged"]) for e in of(events, "skipped_update")]
    assert sorted(skipped) == [(rank, step - 1, True) for rank in range(ranks)]
    bad = {(e["rank"], e["step"], e["bad_step"]) for e in of(events, "step") if e["bad_step"] is not None}
    what = "spike" if kind.startswith("spike") else "gradient norm"
    assert bad == {(rank, step, what) for rank in range(ranks)}
    (event,) = of(events, "grad_spike" if what == "spike" else "not_finite")
    assert (event["step"], event["ranks"], event["action"]) == (step, [ranks - 1], "skip")
    assert f"rank {ranks - 1}" in run.messages
    assert "all ranks skip the step" in run.messages
    assert len(run.result["losses"]) == 12


@pytest.mark.parametrize("layout", [DDP, pytest.param(ZERO3, marks=pytest.mark.slow)])
def test_a_resumed_run_finds_the_spike_that_an_undisturbed_one_finds(plant, layout):
    """Checkpoint at step 9, spike at step 11: only the norms of the checkpoint give a median."""
    options = (*layout.split(), "checkpoint.every_steps=9", "checkpoint.keep_last=9")
    whole, _ = plant(SPIKE, 11, *options)
    (whole.run_dir / "checkpoints" / "step-00000012" / "manifest.json").unlink()
    resumed, events = plant(SPIKE, 11, *options, resume=True)
    assert [(e["generation"], e["step"]) for e in of(events, "grad_spike")] == [(0, 11), (1, 11)]
    assert resumed.losses == whole.losses


@pytest.mark.parametrize(
    ("layout", "snapshots", "source", "restored"),
    [
        (DDP, 5, "snapshot", 5),
        pytest.param(PP, 5, "snapshot", 5, marks=pytest.mark.slow),
        pytest.param(ZERO3, 0, "checkpoint", 4, marks=pytest.mark.slow),
        pytest.param("layout.dp_replicate=1", 5, "snapshot", 5, marks=pytest.mark.slow),
    ],
)
def test_a_rollback_goes_back_and_on_with_later_samples(plant, layout, snapshots, source, restored):
    """The bad step is 7. The run ends after 12 steps and has read 2 or 3 batches more."""
    options = (
        layout,
        f"elastic.snapshot_every={snapshots}",
        "checkpoint.every_steps=4",
        "train.on_bad_step=rollback",
    )
    rank = 0 if layout == "layout.dp_replicate=1" else 1
    run, events = plant(NAN, 7, *options, rank=rank, generations=[0])
    (recovered,) = of(events, "recovered")
    assert (recovered["source"], recovered["restored_step"]) == (source, restored)
    (back,) = of(events, "rolled_back")
    batch = 12
    assert (back["step"], back["skipped_samples"]) == (restored, (7 - restored) * batch)
    manifest = json.loads((run.run_dir / "checkpoints" / "step-00000012" / "manifest.json").read_text())
    assert (manifest["step"], manifest["position"]) == (12, (12 + 7 - restored) * batch)
    assert all(loss is not None for loss in run.losses)


@pytest.mark.slow
def test_rollbacks_are_bounded(plant):
    """Every generation has a bad step. The sixth one ends the run with the named cause."""
    run, events = plant(
        NAN,
        3,
        DDP,
        "elastic.snapshot_every=1",
        "train.on_bad_step=rollback",
        generations=list(range(9)),
        expect=4,
    )
    (error,) = run.result["errors"]
    assert (error["code"], UP in error["message"]) == ("train-not-finite", True)
    assert len(of(events, "rank_lost")) == 5


@pytest.mark.parametrize(
    ("layout", "step", "victim", "named"),
    [
        ("layout.dp_replicate=3", 5, 1, [1]),
        pytest.param(DDP, 5, 1, [0, 1], marks=pytest.mark.slow),
        pytest.param("layout.dp_shard=3 layout.zero=1", 6, 2, [2], marks=pytest.mark.slow),
        pytest.param("layout.dp_replicate=2 layout.dp_shard=2", 5, 3, [1, 3], marks=pytest.mark.slow),
        pytest.param("layout.pp=2 layout.dp_replicate=2", 5, 3, [2, 3], marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_the_weights_of_one_rank_is_named(
    train, tmp_path, monkeypatch, layout, step, victim, named
):
    """Replicas are compared every 2 steps. ZeRO-1 would replace the wrong weight in the next step."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:flip_a_weight_bit")
    (tmp_path / "flip.json").write_text(json.dumps({"rank": victim, "step": step}))
    run = train("run_dir=run", "train.steps=12", "train.replica_check_every=2", *layout.split(), expect=4)
    (error,) = run.result["errors"]
    assert error["code"] == "train-replicas-differ"
    assert "they were equal at step 4" in error["message"]
    (event,) = of(read_events(run.run_dir / EVENTS_FILE).events, "replicas_differ")
    assert (event["step"], event["ranks"], event["equal_at"]) == (6, named, 4)
    assert event["parameters"]


@pytest.mark.parametrize(
    "layout",
    [
        DDP,
        pytest.param("layout.dp_replicate=2 layout.dp_shard=2", marks=pytest.mark.slow),
        pytest.param(
            "layout.dp_shard=4 layout.ep=2 layout.zero=1 model.num_experts=4 model.experts_per_token=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equal_replicas_pass_and_their_comparison_is_audited(train, layout):
    run = train("train.replica_check_every=2", *layout.split())
    (row,) = [row for row in run.result["collectives"] if row["phase"] == "replica_check"]
    assert (row["axis"], row["op"], row["calls"], row["predicted_calls"]) == ("control", "all_gather", 3, 3)
    assert (
        row["bytes"]
        == row["predicted_bytes"]
        == 3 * 8 * run.result["world_size"] * (2 if "layout.ep" in layout else 1)
    )
