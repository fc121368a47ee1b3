"""Kills, truncation, flipped bits, mixed files, full disks and failing calls: fault tests 10 to 15.

Writers are real processes that save small tensors with the code of the ranks, without training. Each test
prints its seed; ``CHECKPOINT_FAULTS_SEED`` replays one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpoint_files import build_write, save
from meshwright.checkpoint.drafts import finish_drafts, list_leftovers
from meshwright.checkpoint.manifest import (
    MANIFEST,
    list_checkpoints,
    read_manifest,
    rotate,
)
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.stores import find_newest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import UserError

RANKS = 4
KILLS = [pytest.param(50, marks=pytest.mark.slow), 5]


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("CHECKPOINT_FAULTS_SEED") or random.SystemRandom().randrange(2**32))
    sys.stdout.write(f"CHECKPOINT_FAULTS_SEED={seed}\n")
    return random.Random(seed)


def tensors_of(value: float, rows: int = 64) -> dict[str, torch.Tensor]:
    """Tensors that all have one value: a mixture of two saves is seen."""
    return {
        "w": torch.full((rows, 256), value),
        "w:exp_avg": torch.full((rows, 256), value),
        "w:step": torch.tensor(value),
        "bias": torch.full((rows,), value),
    }


def value_of(checkpoint: Path) -> float:
    """Verify and load a checkpoint; returns the one value of all its elements."""
    saved = CheckpointReader(checkpoint, read_manifest(checkpoint))
    found = {value for name in saved.names() for value in saved.read(name).unique().tolist()}
    assert len(found) == 1, f"{checkpoint.name} mixes the states {found}"
    return found.pop()


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


class Writers:
    """A process per rank, which saves one checkpoint."""

    def __init__(self, root: Path, step: int, value: float) -> None:
        def write(rank: int) -> None:
            keep = lambda path: rotate(root, Retention(1), path)  # noqa: E731
            build_write(root, rank, RANKS, step, tensors_of(value), on_commit=keep)._run()

        self.pids = [fork(lambda rank=rank: write(rank)) for rank in range(RANKS)]

    def wait(self) -> list[int]:
        """Exit statuses of all."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, rng: random.Random) -> list[int]:
        """SIGKILL, in random order: a machine that goes down."""
        for pid in rng.sample(self.pids, RANKS):
            os.kill(pid, signal.SIGKILL)
        return self.wait()


def measure_save(root: Path) -> float:
    """Seconds that an undisturbed save takes: the shortest of three."""
    seconds = []
    for step in range(3):
        started = time.monotonic()
        assert Writers(root, step, 0.0).wait() == [0] * RANKS
        seconds.append(time.monotonic() - started)
    return min(seconds)


def require_good(root: Path, allowed: set[float]) -> float:
    """All that is there is whole, before and after the successor's clean-up; returns the newest's value.

    An older revision may be there too, where a kill came before its removal.
    """
    for _ in range(2):
        assert list_checkpoints(root), "neither the old nor the new checkpoint is there"
        for path in list_checkpoints(root):
            value_of(path)
        finish_drafts(root)
    found = find_newest(root)
    assert found is not None
    assert found[1] == [], "a checkpoint that does not verify"
    assert value_of(found[0]) in allowed
    return value_of(found[0])


@pytest.mark.parametrize("kills", KILLS)
def test_10_sigkill_during_a_save_keeps_a_whole_checkpoint(tmp_path, rng, kills):
    """Step 4 is saved after step 2, and all writers are killed at a random time."""
    length, seen = measure_save(tmp_path / "timed"), set()
    for number in range(kills):
        root = tmp_path / f"{number}"
        save(root, RANKS, step=2, tensors=tensors_of(2.0))
        writers = Writers(root, 4, 4.0)
        time.sleep(rng.uniform(0, 1.5 * length))
        writers.kill(rng)
        seen.add(require_good(root, {2.0, 4.0}))
        assert not list(root.glob(".step-*.part")), "a draft is left after the successor's clean-up"
        shutil.rmtree(root)
    assert kills < 50 or seen == {2.0, 4.0}, "all kills came too early, or too late"


@pytest.mark.parametrize("kills", KILLS)
def test_11_sigkill_while_a_step_is_saved_again_keeps_the_old_or_the_new_one(tmp_path, rng, kills):
    """The same step again and again, with other values; the older revision is removed on the way."""
    length, newest, replaced = measure_save(tmp_path / "timed"), 0.0, 0
    root = tmp_path / "root"
    save(root, RANKS, step=4, tensors=tensors_of(newest))
    for number in range(1, kills + 1):
        writers = Writers(root, 4, float(number))
        time.sleep(rng.uniform(0, 1.5 * length))
        writers.kill(rng)
        before = newest
        newest = require_good(root, {before, float(number)})
        replaced += newest != before
    assert kills < 50 or 0 < replaced < kills, "all kills came too early, or too late"


@pytest.mark.parametrize("part", [0, 0.5, 0.999])
def test_12_a_truncated_shard_is_named_and_the_previous_checkpoint_is_used(tmp_path, part):
    save(tmp_path, 2, step=2, tensors=tensors_of(2.0))
    newest = save(tmp_path, 2, step=4, tensors=tensors_of(4.0), small_files={"tokenizer.json": b"{}" * 999})
    for name in read_manifest(newest).files:
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[: int(len(content) * part)])
        with pytest.raises(UserError, match=f"{name} is missing or has another size"):
            read_manifest(newest)
        found = find_newest(tmp_path)
        assert found is not None
        assert value_of(found[0]) == 2.0
        assert name in found[1][0]
        assert newest.name in found[1][0]
        (newest / name).write_bytes(content)
    assert value_of(newest) == 4.0


def test_13_every_flipped_bit_is_found(tmp_path, rng):
    """200 random bits, in all files of a checkpoint alike; ``find_newest`` reads no tensor before."""
    save(tmp_path, 2, step=2, tensors=tensors_of(2.0))
    newest = save(tmp_path, 2, step=4, tensors=tensors_of(4.0), small_files={"tokenizer.json": b"{}"})
    files = sorted(newest.iterdir())
    assert len(files) == 4
    for trial in range(200):
        path = files[trial % len(files)]
        content = path.read_bytes()
        flipped, bit = bytearray(content), rng.randrange(8 * len(content))
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        found = find_newest(tmp_path)
        assert found is not None
        assert found[0].name == "step-00000002", f"bit {bit} of {path.name}"
        assert newest.name in found[1][0]
        path.write_bytes(content)
    assert value_of(newest) == 4.0


def test_14_an_old_manifest_with_new_shards_is_refused(tmp_path):
    """Either way round: the sizes are equal, the checksums are not."""
    old = save(tmp_path, 2, step=4, tensors=tensors_of(2.0))
    new = save(tmp_path, 2, step=4, tensors=tensors_of(4.0))
    for manifest, shards in ((old, new), (new, old)):
        mixed = tmp_path / "mixed"
        shutil.copytree(shards, mixed)
        shutil.copy(manifest / MANIFEST, mixed / MANIFEST)
        with pytest.raises(UserError, match=r"the checksum of rank-0000\d.safetensors differs"):
            read_manifest(mixed)
        shutil.rmtree(mixed)


def test_14_shards_that_are_swapped_between_ranks_are_refused(tmp_path):
    checkpoint = save(tmp_path, 2, tensors={"w": torch.arange(8.0)})
    one, other = (checkpoint / f"rank-0000{rank}.safetensors" for rank in range(2))
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    with pytest.raises(UserError, match=r"the checksum of rank-00000.safetensors differs"):
        read_manifest(checkpoint)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mount)]
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small file system needs root: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_15_a_disk_that_is_full_at_any_page_costs_the_new_checkpoint_only(small_disk):
    """Free space from no page to more than enough: the save fails in every file, and at every page of it."""
    root, page = small_disk / "root", os.statvfs(small_disk).f_bsize
    old = save(root, 2, step=2, tensors=tensors_of(2.0))
    files = {"tokenizer.json": b"{}" * page}
    outcomes = []
    for pages in range(100):
        with (small_disk / "filler").open("wb") as filler:
            free = os.statvfs(small_disk).f_bavail * page
            os.posix_fallocate(filler.fileno(), 0, free - pages * page)
        try:
            new = save(root, 2, step=4, tensors=tensors_of(4.0), small_files=files)
        except OSError as error:
            assert "No space left on device" in str(error)  # noqa: PT017
            outcomes.append(False)
        else:
            assert value_of(new) == 4.0
            outcomes.append(True)
            shutil.rmtree(new)
        assert value_of(old) == 2.0
        assert list_leftovers(root) == []
        (small_disk / "filler").unlink()
        if outcomes[-5:] == [True] * 5:
            break
    failed = outcomes.index(True)
    assert failed > 30, "the tensors have 33 pages"
    assert all(outcomes[failed:])
    assert not any(outcomes[:failed])


def save_under_strace(root: Path, injection: str) -> tuple[str, bool]:
    """Save step 4 in a process with failing calls; returns its error, and whether a call failed.

    The process is forked and then traced: no call of the interpreter's start is counted.
    """
    mine, theirs = socket.socketpair()

    def work() -> None:
        theirs.recv(1)
        # One after the other, so that the number of a call says which it is.
        writes = [build_write(root, rank, 2, 4, tensors_of(4.0), small_files={}) for rank in (1, 0)]
        for write in writes:
            write._run()
        theirs.send(str(writes[1].error or "none").encode())

    child = fork(work)
    call = injection.partition(":")[0]
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(child), "-e", f"trace={call}", "-e", f"inject={injection}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if "attached" not in line:
            pytest.skip(f"strace cannot trace: {line.strip()}")
        mine.send(b"x")
        trace = tracer.stderr.read()
    finally:
        if tracer.poll() is None:
            os.kill(child, signal.SIGKILL)
        tracer.communicate()
    os.waitpid(child, 0)
    said = mine.recv(1000).decode()
    mine.close()
    theirs.close()
    return said, "INJECTED" in trace


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        pytest.param("write", "ENOSPC", "No space left on device", marks=pytest.mark.slow),
        pytest.param("write", "EIO", "Input/output error", marks=pytest.mark.slow),
        pytest.param("fsync", "EIO", "Input/output error"),
        pytest.param("rename", "EIO", "Input/output error"),
    ],
)
@pytest.mark.parametrize("ever_after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_15_a_call_that_fails_costs_the_new_checkpoint_only(tmp_path, call, error, says, ever_after):
    """Each call in turn fails, alone or with all that follow (a broken disk): see docs/checkpoints.md."""
    root = tmp_path / "root"
    old = save(root, 2, step=2, tensors=tensors_of(2.0))
    for number in range(1, 100):
        said, failed = save_under_strace(root, f"{call}:error={error}:when={number}{'+' * ever_after}")
        assert value_of(old) == 2.0
        assert list_leftovers(root) == [], f"after {call} {number}: {said}"
        if not failed:
            assert said == "none"
            assert number > 4
            return
        newest = value_of(list_checkpoints(root)[-1])
        assert says in said, f"after {call} {number}"
        # The last fsync is that of the parent folder, after the rename: the checkpoint is there, and whole.
        assert newest == 2.0 or call == "fsync"
        for path in list_checkpoints(root)[1:]:
            shutil.rmtree(path)
    pytest.fail("the save has no end")
