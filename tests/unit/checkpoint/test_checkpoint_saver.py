"""When a rank saves a checkpoint: by steps, by time, on the best evaluation and at the end."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import pytest
import torch

from checkpoint_files import build_saver
from meshwright.checkpoint import saver as module
from meshwright.checkpoint.manifest import best_checkpoint, list_checkpoints
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import TrainState
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.checkpoint.writer import CheckpointWrite
from meshwright.spec.job import Checkpoint


@pytest.fixture
def build(tmp_path, monkeypatch):
    """``build(every_steps=2)``: a saver whose saves are recorded by step."""

    def build(rank: int = 0, ranks: int = 1, **settings) -> CheckpointSaver:
        cluster = SimpleNamespace(failure_hours=1.0, devices_per_node=1)
        job = SimpleNamespace(checkpoint=Checkpoint(**{"every_minutes": 0.0, **settings}), cluster=cluster)
        state = SimpleNamespace(
            plan=SimpleNamespace(job=job, world_size=ranks, host_memory=None),
            counters=TrainState(),
            sharded=SimpleNamespace(local_parameters=lambda: [torch.zeros(1)]),
        )
        saver = CheckpointSaver(CheckpointStores.single(tmp_path), state, rank, events=None)
        saver.saved = []
        record = lambda eval_loss: saver.saved.append(saver.state.counters.step)  # noqa: E731
        monkeypatch.setattr(saver, "_save", record)
        return saver

    return build


def run(saver: CheckpointSaver, losses, requested=False) -> list[int]:
    for index, loss in enumerate(losses):
        saver.state.counters.advance(1)
        saver.after_step(index == len(losses) - 1, loss, requested)
    return saver.saved


def test_saves_every_few_steps_and_at_the_end(build):
    saver = build(every_steps=2)
    assert run(saver, [None] * 5) == [2, 4, 5]
    assert saver.saved_step == 5


def test_the_best_evaluation_is_saved_and_recorded(build):
    saver = build(on_best=True)
    assert run(saver, [3.0, None, 2.0, 2.5, None]) == [1, 3, 5]
    assert saver.state.counters.best_eval_loss == 2.0
    assert run(build(), [3.0, 2.0, None]) == [3], "without checkpoint.on_best only the last one"


def test_the_interval_in_minutes_starts_at_the_last_save(build, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    saver = build(every_minutes=1.0)
    due = []
    for seconds in (59, 61, 62, 121):
        now[0] = float(seconds)
        due.append(saver.is_due_by_time())
        saver.state.counters.advance(1)
        saver.after_step(False, None, save_requested=False)
    assert due == [False, True, False, True]
    assert saver.saved == [2, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_save_on_the_common_request_and_not_by_their_own_clock(build, monkeypatch, rank):
    saver = build(rank=rank, ranks=2, every_minutes=1.0)
    monkeypatch.setattr(saver, "is_due_by_time", lambda: True)
    assert run(saver, [None, None]) == [2], "only the last one"
    saver.saved.clear()
    assert run(saver, [None, None], requested=True) == [3, 4]


def test_auto_replaces_the_minutes_and_keeps_the_steps(build, monkeypatch):
    """The first save is due after 10 typical steps; then the interval counts from the end of a save."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    saver = build(auto=True, every_minutes=1.0, every_steps=30)
    for _ in range(31):
        now[0] += 100.0
        saver.state.counters.advance(1)
        saver.after_step(False, None, save_requested=False, step_s=1.0)
    assert saver.saved == [10, 28, 30], "after 30 min without a committed save, and by steps"


def test_a_save_that_waits_for_the_one_before_is_reported(tmp_path, monkeypatch):
    """The write of step 1 ends only when step 2 waits for it."""
    saver, events = build_waiting_saver(tmp_path, monkeypatch)
    for step in (1, 2):
        saver.state.counters.advance(1)
        saver.after_step(step == 2, None, save_requested=False, step_s=1.0)
    waited = next(fields for name, fields in events if name == "checkpoint_waited")
    assert (waited["step"], waited["previous_step"]) == (2, 1)
    saved = [fields for name, fields in events if name == "checkpoint"]
    assert [fields["step"] for fields in saved] == [1, 2]
    assert saved[0]["waited_s"] == 0 < saved[1]["waited_s"] == waited["waited_s"] <= saved[1]["blocked_s"]
    assert [fields["slowdown"] for fields in saved] == [1.0, None]


def build_waiting_saver(root, monkeypatch):
    """A saver of one tensor that saves after each step; writes are held back until someone waits for them."""
    events, release = [], threading.Event()
    write_and_vote, wait = CheckpointWrite._write_and_vote, CheckpointWrite.wait

    def hold(write):
        release.wait(60)
        return write_and_vote(write)

    def let_go(write):
        release.set()
        wait(write)

    monkeypatch.setattr(CheckpointWrite, "_write_and_vote", hold)
    monkeypatch.setattr(CheckpointWrite, "wait", let_go)
    return build_saver(root, events, every_steps=1), events


def test_rotation_gives_room_for_the_mark_of_the_best(tmp_path, monkeypatch):
    """The commit took the last page of the disk, and the mark fails. Rotation must not wait for it."""
    original, seen = module.mark_best, []

    def mark(root, path):
        seen.append([checkpoint.name[-1] for checkpoint in list_checkpoints(root)])
        if len(seen) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(root, path)

    monkeypatch.setattr(module, "mark_best", mark)
    saver = build_saver(tmp_path, [], every_steps=1, on_best=True, keep_last=2)
    for loss in (3.0, None, None, 2.0):
        saver.state.counters.advance(1)
        saver.after_step(False, loss, False)
        saver._collect(wait=True)
    assert seen == [["1"], ["1", "2", "3", "4"], ["1", "3", "4"]]
    assert best_checkpoint(tmp_path) == "step-00000004"
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3", "4"]


def test_a_best_checkpoint_that_was_not_written_leaves_the_mark_to_the_next_one(tmp_path, monkeypatch):
    """The second save fails. The third is not the lowest loss of the run, but the best that is on disk."""
    saver = build_saver(tmp_path, [], every_steps=1, on_best=True, keep_last=1)
    original = CheckpointWrite._write_and_vote
    for step, loss in enumerate((3.0, 1.0, 2.0), 1):

        def write(one, fails=step == 2):
            if fails:
                raise OSError(errno.EIO, "Input/output error")
            return original(one)

        monkeypatch.setattr(CheckpointWrite, "_write_and_vote", write)
        saver.state.counters.advance(1)
        saver.after_step(False, loss, False)
        saver._collect(wait=True)
    assert best_checkpoint(tmp_path) == "step-00000003"
