"""The fence: a process commits, or another one has its rank; never both."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from meshwright.core.events import EventWriter
from meshwright.launch.fence import CommitGuard, Fence, FencedError, HaltedError


@pytest.fixture
def fence():
    with contextlib.closing(Fence()) as opened:
        yield opened


@pytest.fixture
def guard(fence):
    opened = CommitGuard()
    opened.open(fence.path)
    return opened


def test_a_commit_after_the_fence_is_refused(fence, guard, tmp_path):
    events = EventWriter(tmp_path / "events.jsonl", 0, commit=guard)
    events.write("step", step=1)
    assert fence.shut()
    assert guard.is_shut
    with pytest.raises(FencedError):
        events.write("step", step=2)
    events.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


def test_a_process_inside_a_commit_cannot_be_fenced(fence, guard):
    """A nested commit does not open the gap between two outer ones."""
    with guard():
        with guard():
            pass
        assert not fence.shut()
    assert fence.shut()


def test_a_process_that_was_stopped_inside_a_commit_keeps_the_lock(fence):
    """The lock belongs to the process: it is neither shared with the agent nor lost while it is stopped."""
    pid = os.fork()
    if pid == 0:
        guard = CommitGuard()
        guard.open(fence.path)
        with guard():
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not fence.shut()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert fence.shut()


def test_commits_of_a_halted_generation_are_refused_until_the_next_one(guard):
    guard.begin(3)
    guard.halt(3)
    with pytest.raises(HaltedError), guard():
        pass
    assert not guard.is_shut
    guard.begin(4)
    with guard():
        pass
    guard.halt(4)
    guard.leave()
    with guard():  # the report of a rank that failed
        pass


def test_another_fence_replaces_the_first(fence, guard):
    """A process that rejoins has the fence of its new rank."""
    assert fence.shut()
    with contextlib.closing(Fence()) as second:
        guard.open(second.path)
        with guard():
            assert not second.shut()
