"""State on the host: the numbers are those without it, and the audit knows what left the device."""

from __future__ import annotations

import shutil

import pytest

from meshwright.layout.optimizer_offload import OFFLOADED

SMALL_BUCKETS = "layout.bucket_mb=0.05"
AWAY = ("layout.offload=optimizer", SMALL_BUCKETS)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("layout.dp_replicate=1", "adamw"),
        ("layout.dp_replicate=1", "muon"),
        ("layout.dp_replicate=1", "sgd"),
        ("layout.dp_replicate=2", "adamw"),
        ("layout.dp_shard=2 layout.zero=1", "lion"),
    ],
)
def test_offloaded_optimizer_state_is_bit_identical(train, layout, optimizer):
    """Buckets change no number; the peak loses the state and has the buffers; every byte as predicted."""
    given = (*layout.split(), f"train.optimizer={optimizer}", "layout.micro_batch=3", "train.lr=1e-3")
    here = train(*given, SMALL_BUCKETS)
    away = train(*given, *AWAY)
    assert away.losses == here.losses
    assert away.result["state_bytes"] == here.result["state_bytes"]
    left = away.result["offloaded_bytes"]
    assert left == away.result["predicted_offloaded_bytes"]
    assert left["optimizer"] == away.result["state_bytes"]["optimizer"]
    assert not any(here.result["offloaded_bytes"]["optimizer"])
    assert not any(left["parameters"] + left["gradients"])
    if optimizer == "adamw":
        assert away.result["peak_memory_bytes"][0] < here.result["peak_memory_bytes"][0]


@pytest.mark.parametrize("kind", ["optimizer", "all"])
def test_shards_on_the_host_are_counted_by_kind(train, kind):
    """What the setting names, all of it, and nothing else."""
    result = train("layout.dp_shard=2", f"layout.offload={kind}", SMALL_BUCKETS).result
    for name, found in result["offloaded_bytes"].items():
        assert found == (result["state_bytes"][name] if name in OFFLOADED[kind] else [0, 0])


def test_an_offloaded_run_resumes_bit_identically(train, tmp_path):
    """A checkpoint does not say where the state lay: one from the device is read into the host's buffers."""
    common = ("layout.dp_shard=2", "train.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    straight = train(*common)
    folder = tmp_path / "from-the-device"
    shutil.copytree(straight.run_dir / "checkpoints" / "step-00000003", folder / "step-00000003")
    again = train(*common, *AWAY, f"checkpoint.dir={folder}", resume=True)
    assert again.losses == straight.losses[3:]


def test_state_that_is_not_offloaded_fails_the_audit(train, monkeypatch):
    """A rank that was asked to offload and does not: the audit says what is missing on the host."""
    monkeypatch.setattr("meshwright.runs.train.ENTRY", "injected_faults:optimizer_state_not_offloaded")
    result = train("layout.dp_replicate=1", *AWAY, expect=3).result
    assert any("optimizer in CPU memory is 0 bytes" in said for said in result["differences"])
