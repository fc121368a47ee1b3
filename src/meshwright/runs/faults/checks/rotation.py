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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import BEST_FILE, list_checkpoints, read_manifest
from meshwright.checkpoint.stores import find_newest
from meshwright.runs.faults.checks.check import CannotRunError, CheckRun, require
from meshwright.runs.faults.checks.failing_disk import trace
from meshwright.runs.faults.checks.small_checkpoints import InlineSaver, fork

CHANGES_NAMES = ("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat")
"""Calls after which a folder has other entries."""
EXPECTED = ("openat", "write", "fsync", "rename", "mkdir", "rmdir", "close")
PR_SET_PTRACER = 0x59616D61
LOSSES = {1: 3.0, 2: 2.0, 3: 1.0, 4: 1.5}
"""Held-out loss of each step: the child saves the best checkpoint."""
LEAST_HIT = 0.9
"""Share of the calls at which the child must have been killed."""


def check_rotation(check: CheckRun, calls: Sequence[str] = ()) -> None:
    """Kill the child before each call of these names, all if none are given."""
    if shutil.which("strace") is None:
        raise CannotRunError("strace is not installed")
    saved, root = check.folder / "saved", check.folder / "root"
    for step in (1, 2):
        save_and_rotate(saved, step, 0)

    def work() -> None:
        save_and_rotate(root, 3, 1)

    shutil.copytree(saved, root)
    counts = _count_calls(work, check.folder / "log")
    names = [path.name for path in list_checkpoints(root)]
    require(names == ["step-00000002", "step-00000003"], f"an undisturbed rotation leaves {names}")
    chosen = sorted(counts if not calls else set(calls) & set(counts))
    require(calls or set(EXPECTED) <= set(chosen), f"only these calls were seen: {chosen}")
    kills = 0
    for name in chosen:
        for number in range(1, counts[name] + 1):
            shutil.rmtree(root)
            shutil.copytree(saved, root)
            inject = f"inject={name}:signal=KILL:when={number}"
            kills += _run_traced(work, "-o", "/dev/null", "-e", f"trace={name}", "-e", inject)
            _require_whole(root, f"after a kill at {name} {number}")
    wanted = LEAST_HIT * sum(counts[name] for name in chosen)
    require(kills >= wanted, f"{kills} kills took effect, {wanted:.0f} expected")
    check.count("kills", kills)
    check.count("system calls by name", len(chosen))


def save_and_rotate(root: Path, step: int, generation: int) -> None:
    """The work of rank 0: finish the drafts of the previous generation, save, mark the best, rotate."""
    events: list[tuple[str, dict[str, Any]]] = []
    saver = InlineSaver(root, events, generation, keep_last=2, on_best=True)
    saver.state.counters.step = step
    saver.state.counters.best_eval_loss = min((LOSSES[before] for before in range(1, step)), default=9.0)
    saver.after_step(last=True, eval_loss=LOSSES[step], save_requested=False)
    require([name for name, _ in events] == ["checkpoint"], f"the save was reported as {events}")


def _run_traced(work: Callable[[], None], *options: str) -> bool:
    """Run in a child that strace watches; returns whether the child was killed."""
    ready, release = os.pipe()

    def wait_and_work() -> None:
        os.close(release)
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # by any process
        os.read(ready, 1)
        work()

    child = fork(wait_and_work)
    os.close(ready)
    with trace(child, *options) as strace:
        assert strace.stderr is not None, "a pipe"
        output = strace.stderr.readline()
        if "attached" not in output:
            os.kill(child, signal.SIGKILL)
        os.close(release)
        _, status = os.waitpid(child, 0)
        strace.communicate()
    if "attached" not in output:
        raise CannotRunError(f"strace cannot attach to a child process: {output.strip()}")
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def _count_calls(work: Callable[[], None], log: Path) -> dict[str, int]:
    """How often the child makes each system call."""
    require(not _run_traced(work, "-o", str(log)), "the child was killed without a reason")
    names = re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE)
    return collections.Counter(name for name in names if name != "exit_group")


def _require_whole(root: Path, when: str) -> None:
    """The folder after the crash, and after the next save."""
    found = find_newest(root)
    require(found is not None, f"{when}: no checkpoint is left")
    assert found is not None, "required before"
    require(found[0].name in ("step-00000002", "step-00000003"), f"{when}: {found[0].name} is the newest")
    for path in list_checkpoints(root):
        read_manifest(path)  # none is partial
    save_and_rotate(root, 4, 2)
    names = {path.name for path in root.iterdir()} - {BEST_FILE}
    allowed = {"step-00000002", "step-00000003", "step-00000004"}
    require({"step-00000004"} < names <= allowed, f"{when}: the next save leaves {names}")
    for name in names:
        read_manifest(root / name)
