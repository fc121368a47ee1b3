"""Fault test 15: a disk that is full at every page of a save, and calls that fail.

A failed save costs the new checkpoint only. Training goes on, and the next save is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshwright.checkpoint.drafts import list_leftovers
from meshwright.checkpoint.manifest import list_checkpoints, read_manifest
from meshwright.runs.faults.checks.check import CannotRunError, CheckRun, require
from meshwright.runs.faults.checks.running_command import Command, commands
from meshwright.runs.faults.checks.small_checkpoints import build_write, fill_tensors, fork, read_value, save
from meshwright.runs.faults.job import TinyJob

NO_SPACE, IO_ERROR = "No space left on device", "Input/output error"
CALLS = (("write", "ENOSPC", NO_SPACE), ("fsync", "EIO", IO_ERROR), ("rename", "EIO", IO_ERROR))
"""System call, its error, and what the message has."""
MOST_CALLS = 100


def check_failing_disk(check: CheckRun) -> None:
    """A full disk at each page and in training; with strace, calls of a save and of training that fail."""
    with small_disk(check.folder / "disk", "6m") as disk:
        check_full_pages(check, disk)
    job = TinyJob.write(check.folder)
    with (
        small_disk(check.folder / "small-disk", "400k") as disk,
        commands(check.folder) as start,
    ):
        check_training_on_full_disk(start, job.file, disk, "layout.dp_shard=2")
    if shutil.which("strace") is None:
        check.progress("strace is not installed: no failing calls")
        return
    for number, (call, error, says) in enumerate(CALLS):
        check_failing_call(check, check.folder / f"calls-{number}", call, error, says)
    with commands(check.folder) as start:
        check_training_with_failing_fsync(start, job.file, check.folder / "run", rank=1)


@contextlib.contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """A small file system.

    Raises:
        CannotRunError: It cannot be mounted.
    """
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
    try:
        done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CannotRunError("mount is not installed") from None
    if done.returncode:
        raise CannotRunError(f"mounting a small file system needs root: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def check_full_pages(check: CheckRun, disk: Path) -> None:
    """Free space from no page to more than enough: the save fails in every file, and at every page of it."""
    root, page = disk / "root", os.statvfs(disk).f_bsize
    old = save(root, 2, step=2, tensors=fill_tensors(2.0))
    outcomes: list[bool] = []
    while outcomes[-5:] != [True] * 5:
        require(len(outcomes) < MOST_CALLS, "no save succeeds")
        with (disk / "filler").open("wb") as filler:
            free = os.statvfs(disk).f_bavail * page
            os.posix_fallocate(filler.fileno(), 0, free - len(outcomes) * page)
        outcomes.append(_tries_to_save(root, page))
        require(read_value(old) == 2.0, "the old checkpoint has changed")
        require(list_leftovers(root) == [], f"left behind: {list_leftovers(root)}")
        (disk / "filler").unlink()
    failed = outcomes.index(True)
    require(failed > 30, f"only {failed} saves failed; the tensors have 33 pages")
    require(all(outcomes[failed:]), "a save failed with more room than one that succeeded")
    check.count("saves on a full disk", failed)


def _tries_to_save(root: Path, page: int) -> bool:
    """Save step 4, and remove it; returns whether there was room."""
    try:
        new = save(root, 2, step=4, tensors=fill_tensors(4.0), small_files={"tokenizer.json": b"{}" * page})
    except OSError as error:
        require(NO_SPACE in str(error), f"the error does not say why: {error}")
        return False
    require(read_value(new) == 4.0, "the new checkpoint is another one")
    shutil.rmtree(new)
    return True


def check_failing_call(
    check: CheckRun, root: Path, call: str, error: str, says: str, ever_after: bool = False
) -> None:
    """Each call of a save in turn fails, alone or with all that follow (a broken disk)."""
    old = save(root, 2, step=2, tensors=fill_tensors(2.0))
    for number in range(1, MOST_CALLS):
        output, failed = save_under_strace(root, f"{call}:error={error}:when={number}{'+' * ever_after}")
        require(read_value(old) == 2.0, "the old checkpoint has changed")
        require(list_leftovers(root) == [], f"after {call} {number}: {output}: {list_leftovers(root)}")
        if not failed:
            require(output == "none" and number > 4, f"{call} {number} did not fail: {output}")
            check.count(f"failed calls of {call}", number - 1)
            return
        newest = read_value(list_checkpoints(root)[-1])
        require(says in output, f"after {call} {number}: {output}")
        # The last fsync is that of the parent folder, after the rename: the checkpoint is there, and whole.
        require(newest == 2.0 or call == "fsync", f"{call} {number} failed, and the checkpoint is there")
        for path in list_checkpoints(root)[1:]:
            shutil.rmtree(str(path))
    require(False, "the save has no end")


def save_under_strace(root: Path, injection: str) -> tuple[str, bool]:
    """Save step 4 in a process with failing calls; returns its error, and whether a call failed.

    The process is forked and then traced: no call of the interpreter's start is counted.

    Raises:
        CannotRunError: strace cannot trace it.
    """
    mine, theirs = socket.socketpair()

    def work() -> None:
        theirs.recv(1)
        # One after the other, so that the number of a call says which it is.
        writes = [build_write(root, rank, 2, 4, fill_tensors(4.0), small_files={}) for rank in (1, 0)]
        for write in writes:
            write._run()
        theirs.send(str(writes[1].error or "none").encode())

    child = fork(work)
    call = injection.partition(":")[0]
    tracer = trace(child, "-f", "-e", f"trace={call}", "-e", f"inject={injection}")
    assert tracer.stderr is not None, "a pipe"
    try:
        line = tracer.stderr.readline()
        if "attached" not in line:
            raise CannotRunError(f"strace cannot trace: {line.strip()}")
        mine.send(b"x")
        traced = tracer.stderr.read()
    finally:
        if tracer.poll() is None:
            os.kill(child, signal.SIGKILL)
        tracer.communicate()
    os.waitpid(child, 0)
    output = mine.recv(1000).decode()
    mine.close()
    theirs.close()
    return output, "INJECTED" in traced


def trace(pid: int, *options: str) -> subprocess.Popen[str]:
    """Attach strace to a process."""
    command: Sequence[str] = ["strace", "-p", str(pid), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def fill_disk(disk: Path) -> None:
    """Fill a file system completely."""
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, b"x" * 1024)
    os.close(filler)
    require(os.statvfs(disk).f_bavail == 0, "the disk must be full now")


def check_training_on_full_disk(start: Callable[..., Command], job: Path, disk: Path, layout: str) -> None:
    """All steps run, and the exit status and code report the missing checkpoint.

    With FSDP, rank 0 still joins the all-gathers of a checkpoint that it cannot write: the audit counts them.
    """
    run_dir = disk / "run"
    running = start(
        "train", job, layout, "train.steps=40", "checkpoint.every_steps=10", f"run_dir={run_dir}", "--json"
    )
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    fill_disk(disk)
    status, out, err = running.finish()
    result = json.loads(out)
    require(len(result["losses"]) == 40, f"{len(result['losses'])} of 40 steps: {err}")
    require(result["audit_ok"], f"the audit differs: {result['differences']}")
    require(status == 4, f"status {status}: a run without a final checkpoint is a failure for scripts")
    require("[checkpoint-not-written]" in err, f"no error about the checkpoint: {err}")
    require("lines are lost" in err, f"no warning about lost events: {err}")
    require(not list(run_dir.glob("checkpoints/.*")), "a half-written checkpoint was left behind")


def check_training_with_failing_fsync(
    start: Callable[..., Command], job: Path, run_dir: Path, rank: int
) -> None:
    """An fsync of a rank fails with EIO. That checkpoint is lost, the next ones are written."""
    running = start(
        "train",
        job,
        "layout.dp_shard=2",
        "train.steps=300",
        "checkpoint.every_steps=60",
        f"run_dir={run_dir}",
        "checkpoint.keep_last=9",
    )
    pid = running.wait_for(run_dir, lambda e: e["event"] == "started" and e["rank"] == rank)["pid"]
    running.wait_for(run_dir, lambda e: e["event"] == "step" and e["step"] == 3)
    tracer = trace(pid, "-f", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=1")
    try:
        running.wait_for(run_dir, lambda e: e["event"] == "checkpoint_failed", limit_s=120)
    finally:
        if tracer.poll() is None:
            tracer.terminate()
        traced = tracer.communicate()[1]
    require("INJECTED" in traced, "no call failed")
    status, _, err = running.finish()
    events = running.events(run_dir)
    failures = [event for event in events if event["event"] == "checkpoint_failed"]
    require(len(failures) == 1, f"{len(failures)} checkpoints failed")
    step, reason = failures[0]["step"], failures[0]["reason"]
    require(IO_ERROR in reason, f"the reason is not named: {reason}")
    require(f"rank {rank}" in reason or rank == 0, f"the rank is not named: {reason}")
    require(status == 0 and "[checkpoint-not-written]" in err, f"status {status}: {err}")
    done = max(event["step"] for event in events if event["event"] == "step")
    require(done == 300, f"{done} of 300 steps were done")
    saved = [read_manifest(path).step for path in list_checkpoints(run_dir / "checkpoints")]
    require(saved == [s for s in range(60, 301, 60) if s != step], f"saved steps {saved}, failed {step}")
    require(list_leftovers(run_dir / "checkpoints") == [], "a draft is left")
