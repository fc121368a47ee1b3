"""``examples/finetune-7b.toml``: 7B parameters fit on four 24 GB GPUs, and only with its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
JOB = "examples/finetune-7b.toml"
CARD_BYTES = 24e9
CONTEXT_BYTES = 1e9
"""Memory of the CUDA context and NCCL."""
REPLICAS = ("layout.dp_shard=1", "layout.dp_replicate=4", "layout.zero=0")


@pytest.fixture
def plan(cli, monkeypatch):
    """``plan("layout.recompute=none")``: plans the example with overrides, from the repository root."""
    monkeypatch.chdir(ROOT)
    return lambda *changes: cli("plan", JOB, *changes, "--json")


def test_the_example_fits_its_gpus(plan):
    """The peak of every rank, with 5% for the allocator and the CUDA context, is below 24 GB."""
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
        ("optimizer offload", ("layout.offload=none",)),
        ("activation checkpointing", ("layout.recompute=none",)),
        ("sharding", REPLICAS),
    ],
)
def test_the_example_does_not_fit_without(plan, without, changes):
    refused = plan(*changes)
    assert (refused.status, refused.codes) == (2, ["plan-nothing-fits"]), f"it fits without {without}"


@pytest.mark.slow
def test_a_dry_run_of_the_example_matches_the_plan(cli, monkeypatch):
    """One step of a rank at full size with fake tensors: peak and offloaded state as planned."""
    monkeypatch.chdir(ROOT)
    ran = cli("dry-run", JOB, "train.global_batch=8", "--rank", "2", "--json")
    assert ran.status == 0, ran.err
    [peak] = [row for row in ran.json["state"] if row["kind"] == "peak"]
    assert peak["measured"] == pytest.approx(peak["predicted"], rel=1e-3)
    assert 1.05 * max(peak["measured"], ran.json["job_peak_bytes"]) + CONTEXT_BYTES < CARD_BYTES
    [offloaded] = [row for row in ran.json["state"] if row["kind"] == "optimizer in CPU memory"]
    assert offloaded["measured"] > 13.4e9
