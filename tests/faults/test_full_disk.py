"""Training on a full disk: events and checkpoints are lost, the run completes. Uses a small tmpfs."""

from __future__ import annotations

import pytest

from meshwright.runs.faults.checks.failing_disk import check_training_on_full_disk, fill_disk


@pytest.mark.parametrize("layout", [pytest.param("dp_replicate=2", marks=pytest.mark.slow), "dp_shard=2"])
def test_training_continues_when_the_disk_is_full(command, job_file, small_disk, layout):
    """All steps run. The disk is smaller than one checkpoint."""
    check_training_on_full_disk(command, job_file, small_disk("400k"), f"layout.{layout}")


def test_a_disk_full_at_the_start_is_refused(command, job_file, small_disk):
    """The command is refused before any rank starts and leaves no run folder."""
    disk = small_disk("400k")
    fill_disk(disk)
    run_dir = disk / "run"
    status, _, err = command("train", job_file, f"run_dir={run_dir}").finish()
    assert status == 2
    assert "[run-not-writable]" in err
    assert not run_dir.exists()
