"""A full disk costs log lines and checkpoints, never the run. On a real, small file system."""

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
    """Write until nothing more goes in."""
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, b"x" * 1024)
    os.close(filler)
    assert os.statvfs(disk).f_bavail == 0, "the disk must be full now"


@pytest.mark.parametrize("layout", [pytest.param("dp_replicate=2", marks=pytest.mark.slow), "dp_shard=2"])
def test_training_goes_on_when_the_disk_is_full(command, job_file, small_disk, layout):
    """Events and checkpoints cannot be written; the run ends well and says what it lost.

    Where tensors are cut, the rank that writes goes on to take part in every gather: the audit counts them.
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
    assert status == 4, "what was trained could not be saved: a script must not take that for done"
    assert "[checkpoint-not-written]" in err
    assert "lines are lost, training continues" in err
    assert "no checkpoint" in err
    assert not list(run_dir.glob("checkpoints/.*")), "a half-written checkpoint was left behind"


def test_a_disk_that_is_full_from_the_start_is_refused(command, job_file, small_disk):
    """Nothing can be written at all: a clear error before any rank starts, and no folder is left."""
    fill(small_disk)
    run_dir = small_disk / "run"
    status, _, err = command("train", job_file, f"run_dir={run_dir}").finish()
    assert status == 2
    assert "-not-writable]" in err
    assert not run_dir.exists()
