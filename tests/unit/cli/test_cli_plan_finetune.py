"""``examples/finetune-7b.toml``: 7 G parameters on four cards of 24 GB fit, and what makes them fit."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """Every rank's peak, with 5% for the allocator and CUDA's own memory, is below the card's."""
    planned = plan()
    assert planned.status == 0, planned.err
    (layout,) = planned.json["layouts"]
    assert {k: layout["layout"][k] for k in ("dp_shard", "zero", "offload")} == {
        "dp_shard": 4,
        "zero": 3,
        "offload": "optimizer",
    }
    peaks = [rank["peak"] for rank in layout["memory_bytes"].values()]
    assert min(peaks) > 13.5e9, "masters and gradients alone are 13.5 GB"
    assert 1.05 * max(peaks) + CONTEXT_BYTES < CARD_BYTES


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


@pytest.mark.slow
def test_torch_itself_would_need_as_much(cli, monkeypatch):
    """One step of a rank at full size, with fake tensors: state and bytes as planned, and the peak."""
    monkeypatch.chdir(ROOT)
    ran = cli("dry-run", JOB, "train.global_batch=8", "--rank", "2", "--json")
    assert ran.status == 0, ran.err
    [peak] = [row for row in ran.json["state"] if row["kind"] == "peak"]
    assert peak["measured"] == pytest.approx(peak["predicted"], rel=1e-3)
    assert 1.05 * max(peak["measured"], ran.json["job_peak_bytes"]) + CONTEXT_BYTES < CARD_BYTES
    [away] = [row for row in ran.json["state"] if row["kind"] == "optimizer in CPU memory"]
    assert away["measured"] > 13.4e9
