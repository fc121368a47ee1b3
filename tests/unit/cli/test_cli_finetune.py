"""``examples/finetune-7b.toml``: 7 G parameters on four cards of 24 GB fit, and what makes them fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.plan.ledger import predict_ledger
from meshwright.plan.shapes import list_parameters
from meshwright.spec.load import load_job

ROOT = Path(__file__).parents[3]
JOB = "examples/finetune-7b.toml"
CARD_BYTES = 24e9
CONTEXT_BYTES = 1e9
"""What CUDA and NCCL take of a card before any tensor does."""
REPLICAS = ("layout.dp_shard=1", "layout.dp_replicate=4", "layout.zero=0")


@pytest.fixture
def plan(cli, monkeypatch):
    """``plan("layout.recompute=none")``: the example with changes, planned where its paths begin."""
    monkeypatch.chdir(ROOT)
    return lambda *changes: cli("plan", JOB, *changes, "--json")


def test_it_is_planned_to_fit(plan):
    """Every rank's peak, allocator and context included, is below the card's memory."""
    planned = plan()
    assert planned.status == 0, planned.err
    (layout,) = planned.json["layouts"]
    assert {k: layout["layout"][k] for k in ("dp_shard", "zero", "offload")} == {
        "dp_shard": 4,
        "zero": 3,
        "offload": "optimizer",
    }
    peaks = [rank["peak"] for rank in layout["memory_bytes"].values()]
    assert all(13.5e9 < peak < CARD_BYTES for peak in peaks), "masters and gradients alone are 13.5 GB"


@pytest.mark.parametrize(
    ("without", "changes"),
    [
        ("moments in the host's memory", ("layout.offload=none",)),
        ("recomputation", ("layout.recompute=none",)),
        ("shards", REPLICAS),
    ],
)
def test_it_does_not_fit_without(plan, without, changes):
    refused = plan(*changes)
    assert (refused.status, refused.codes) == (2, ["plan-nothing-fits"]), f"it fits without {without}"


def test_the_ledger_of_the_run_leaves_as_much_room(monkeypatch):
    """Moment by moment, with the group around the blocks, which the search does not count: it still fits."""
    monkeypatch.chdir(ROOT)
    job = load_job(JOB, ["layout.offload=none"], to_run=False)
    ledger = predict_ledger(job, micro_batch=1, micro_batches=job.train.global_batch // 4)
    moments = 2 * 4 * sum(p.count for p in list_parameters(job.model)) / 4
    assert ledger.state_bytes["optimizer"] == pytest.approx(moments, rel=1e-3)
    assert ledger.peak_bytes + CONTEXT_BYTES > CARD_BYTES
    assert 1.05 * (ledger.peak_bytes - moments) + CONTEXT_BYTES < CARD_BYTES
