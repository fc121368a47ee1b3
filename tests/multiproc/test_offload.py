"""Offloaded state on real ranks: equal losses, and an audit of the bytes in CPU memory."""

from __future__ import annotations

import shutil

import pytest

from meshwright.layout.optimizer_offload import OFFLOADED

SMALL_BUCKETS = "layout.bucket_mb=0.05"
OFFLOADED_OPTIMIZER = ("layout.offload=optimizer", SMALL_BUCKETS)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        pytest.param("layout.dp_replicate=1", "adamw", marks=pytest.mark.slow),
        pytest.param("layout.dp_replicate=1", "muon", marks=pytest.mark.slow),
        pytest.param("layout.dp_replicate=1", "sgd", marks=pytest.mark.slow),
        ("layout.dp_replicate=2", "adamw"),
        ("layout.dp_shard=2 layout.zero=1", "lion"),
    ],
)
def test_offloaded_optimizer_state_is_bit_identical(train, layout, optimizer):
    """Equal losses and state; all optimizer state is in CPU memory, as predicted; AdamW's peak falls."""
    settings = (*layout.split(), f"train.optimizer={optimizer}", "layout.micro_batch=3", "train.lr=1e-3")
    on_device = train(*settings, SMALL_BUCKETS)
    offloaded = train(*settings, *OFFLOADED_OPTIMIZER)
    assert offloaded.losses == on_device.losses
    assert offloaded.result["state_bytes"] == on_device.result["state_bytes"]
    in_cpu_memory = offloaded.result["offloaded_bytes"]
    assert in_cpu_memory == offloaded.result["predicted_offloaded_bytes"]
    assert in_cpu_memory["optimizer"] == offloaded.result["state_bytes"]["optimizer"]
    assert not any(on_device.result["offloaded_bytes"]["optimizer"])
    assert not any(in_cpu_memory["parameters"] + in_cpu_memory["gradients"])
    if optimizer == "adamw":
        assert offloaded.result["peak_memory_bytes"][0] < on_device.result["peak_memory_bytes"][0]


@pytest.mark.parametrize("kind", [pytest.param("optimizer", marks=pytest.mark.slow), "all"])
def test_offload_moves_all_bytes_of_its_kinds_of_fsdp_state(train, kind):
    """Other kinds of state stay on the device."""
    result = train("layout.dp_shard=2", f"layout.offload={kind}", SMALL_BUCKETS).result
    for name, found in result["offloaded_bytes"].items():
        assert found == (result["state_bytes"][name] if name in OFFLOADED[kind] else [0, 0])


def test_an_offloaded_run_resumes_bit_identically(train, tmp_path):
    """The checkpoint comes from a run without offload: its format does not depend on it."""
    common = ("layout.dp_shard=2", "train.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    straight = train(*common)
    folder = tmp_path / "not-offloaded"
    shutil.copytree(straight.run_dir / "checkpoints" / "step-00000003", folder / "step-00000003")
    resumed = train(*common, *OFFLOADED_OPTIMIZER, f"checkpoint.dir={folder}", resume=True)
    assert resumed.losses == straight.losses[3:]


def test_state_that_is_not_offloaded_fails_the_audit(train, monkeypatch):
    """The job offloads the optimizer state, but its bytes in CPU memory are 0."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:optimizer_state_not_offloaded")
    result = train("layout.dp_replicate=1", *OFFLOADED_OPTIMIZER, expect=3).result
    assert not result["audit_ok"]
    assert result["offloaded_bytes"]["optimizer"] == [0]
    assert result["predicted_offloaded_bytes"]["optimizer"][0] > 0
