"""Fault test 19: a process that saves and rotates is killed at each of its system calls, by strace.

There is always a checkpoint that verifies, and the next save leaves nothing behind but checkpoints.
"""

from __future__ import annotations

import collections
import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_files import build_saver
from meshwright.checkpoint.manifest import BEST_FILE, list_checkpoints, read_manifest
from meshwright.checkpoint.stores import find_newest
from meshwright.checkpoint.writer import CheckpointWrite

CHANGES_NAMES = ("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat")
"""Calls after which a folder has other entries."""
PR_SET_PTRACER = 0x59616D61
LOSSES = {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5}
"""Of the evaluation of each step: the child saves the best checkpoint."""


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """A folder with the checkpoints of steps 1 and 2, of which the second is the best."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    monkeypatch.setattr(CheckpointWrite, "start", CheckpointWrite._run)  # one thread: its calls are counted
    monkeypatch.setattr(CheckpointWrite, "wait", lambda write: None)
    for step in (1, 2):
        save_and_rotate(tmp_path / "saved", step, 0, monkeypatch)
    return tmp_path / "saved"


def save_and_rotate(root: Path, step: int, generation: int, monkeypatch) -> None:
    """What rank 0 does: finish the drafts of the generation before, save, mark the best, rotate."""
    events: list = []
    saver = build_saver(root, monkeypatch, events, generation, keep_last=2, on_best=True)
    saver.state.counters.step = step
    saver.state.counters.best_eval_loss = min((LOSSES[before] for before in range(1, step)), default=9.0)
    saver.after_step(last=True, eval_loss=LOSSES[step], save_requested=False)
    assert [name for name, _ in events] == ["checkpoint"], events


def run_traced(work: Callable[[], None], *options: str) -> bool:
    """Run in a child that strace watches; returns whether the child was killed."""
    ready, release = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(release)
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # by any process
            os.read(ready, 1)
            work()
        finally:
            os._exit(0)
    os.close(ready)
    command = ["strace", "-p", str(child), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        said = strace.stderr.readline()
        if "attached" not in said:
            os.kill(child, signal.SIGKILL)
        os.close(release)
        _, status = os.waitpid(child, 0)
        strace.communicate()
    if "attached" not in said:
        pytest.skip(f"strace cannot attach to a child process: {said.strip()}")
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def count_calls(work: Callable[[], None], log: Path) -> dict[str, int]:
    """How often the child makes each system call."""
    assert not run_traced(work, "-o", str(log))
    names = re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE)
    return collections.Counter(name for name in names if name != "exit_group")


def kill_at_each(calls, saved: Path, tmp_path: Path, monkeypatch) -> dict[str, int]:
    """Kill the child before each call of these names (all if empty); returns how often, by name."""
    root = tmp_path / "root"

    def work() -> None:
        save_and_rotate(root, 3, 1, monkeypatch)

    shutil.copytree(saved, root)
    counts = count_calls(work, tmp_path / "log")
    assert [path.name for path in list_checkpoints(root)] == ["step-00000002", "step-00000003"]
    kills: dict[str, int] = collections.Counter()
    for name in sorted(counts if not calls else set(calls) & set(counts)):
        for number in range(1, counts[name] + 1):
            shutil.rmtree(root)
            shutil.copytree(saved, root)
            inject = f"inject={name}:signal=KILL:when={number}"
            kills[name] += run_traced(work, "-o", "/dev/null", "-e", f"trace={name}", "-e", inject)
            check_rotation(root, f"{name} {number}", monkeypatch)
    assert sum(kills.values()) >= 0.9 * sum(counts[name] for name in kills), (kills, counts)
    return kills


def check_rotation(root: Path, when: str, monkeypatch) -> None:
    """The folder after the crash, and after the next save."""
    found = find_newest(root)
    assert found is not None, when
    assert found[0].name in ("step-00000002", "step-00000003"), when
    for path in list_checkpoints(root):
        read_manifest(path)  # none is partial
    save_and_rotate(root, 4, 2, monkeypatch)
    names = {path.name for path in root.iterdir()} - {BEST_FILE}
    assert {"step-00000004"} < names <= {"step-00000002", "step-00000003", "step-00000004"}, when
    for name in names:
        read_manifest(root / name)


def test_a_crash_at_each_change_of_names_keeps_a_whole_checkpoint(saved, tmp_path, monkeypatch):
    kills = kill_at_each(CHANGES_NAMES, saved, tmp_path, monkeypatch)
    assert set(kills) >= {"rename", "mkdir", "rmdir"}
    assert set(kills) & {"unlink", "unlinkat"}
    assert sum(kills.values()) > 10


@pytest.mark.slow
def test_a_crash_at_each_system_call_keeps_a_whole_checkpoint(saved, tmp_path, monkeypatch):
    kills = kill_at_each((), saved, tmp_path, monkeypatch)
    assert set(kills) >= {"openat", "write", "fsync", "rename", "mkdir", "rmdir", "close"}
    assert sum(kills.values()) > 100
