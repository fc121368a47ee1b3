"""Training on a full disk: events and checkpoints are lost, the run completes. Uses a small tmpfs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB, smaller than one checkpoint."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(disk: Path) -> None:
    """Fill the file system completely."""
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, b"x" * 1024)
    os.close(filler)
    assert os.statvfs(disk).f_bavail == 0, "the disk must be full now"


@pytest.mark.parametrize("layout", [pytest.param("dp_replicate=2", marks=pytest.mark.slow), "dp_shard=2"])
def test_training_continues_when_the_disk_is_full(command, job_file, small_disk, layout):
    """All steps run, and the exit status and code report the missing checkpoint.

    With FSDP, rank 0 still joins the all-gathers of a checkpoint that it cannot write: the audit counts them.
    """
    run_dir = small_disk / "run"
    running = command(
        "train", job_file, f"layout.{layout}", "train.steps=40", "checkpoint.every_steps=10",
        f"run_dir={run_dir}", "--json",
    )  # fmt: skip
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    fill(small_disk)
    status, out, err = running.finish()
    result = json.loads(out)
    assert len(result["losses"]) == 40, err
    assert result["audit_ok"], result["differences"]
    assert status == 4, "a run without a final checkpoint is a failure for scripts"
    assert "[checkpoint-not-written]" in err
    assert "lines are lost" in err, "no warning about lost events"
    assert not list(run_dir.glob("checkpoints/.*")), "a half-written checkpoint was left behind"


def test_a_disk_full_at_the_start_is_refused(command, job_file, small_disk):
    """The command is refused before any rank starts and leaves no run folder."""
    fill(small_disk)
    run_dir = small_disk / "run"
    status, _, err = command("train", job_file, f"run_dir={run_dir}").finish()
    assert status == 2
    assert "[run-not-writable]" in err
    assert not run_dir.exists()
