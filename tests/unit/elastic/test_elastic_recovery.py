"""The parts of a recovery: what the event ``recovered`` and the event ``replayed`` say."""

from __future__ import annotations

import pytest

from meshwright.elastic import recovery as module
from meshwright.elastic.recovery import Recovery


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def recover(clock, restored_step=20, furthest_step=25):
    """A failure known at 100 s; all had left at 101, were ordered at 103, and were ready at 110."""
    recovery = Recovery(failed_at=100.0, detect_s=0.25)
    clock[0] = 101.0
    recovery.note_halted(failed_rank=1, how="killed by SIGKILL")
    clock[0] = 103.0
    recovery.note_ordered("snapshot", furthest_step)
    recovery.note_setup(0, {"start": 0.1, "join": 3.9, "rebuild": 1.0, "load": 0.5})
    recovery.note_setup(1, {"start": 3.0, "join": 1.0, "rebuild": 2.0, "load": 1.0})
    clock[0] = 110.0
    return recovery, recovery.finish(restored_step)


def test_every_part_is_in_the_event(clock):
    """Setup parts are those of the rank that started last. Together the parts are the whole time."""
    _, fields = recover(clock)
    assert fields == {
        "failed_rank": 1,
        "how": "killed by SIGKILL",
        "source": "snapshot",
        "restored_step": 20,
        "replayed_steps": 5,
        "detect_s": 0.25,
        "halt_s": 1.0,
        "decide_s": 2.0,
        "start_s": 3.0,
        "join_s": 1.0,
        "rebuild_s": 2.0,
        "load_s": 1.0,
        "seconds": 10.0,
    }


def test_replayed_steps_are_reported_once_with_their_time(clock):
    recovery, _ = recover(clock)
    assert recovery.note_step(24) is None
    clock[0] = 112.5
    assert recovery.note_step(25) == {"restored_step": 20, "steps": 5, "seconds": 2.5}
    assert recovery.note_step(26) is None


def test_nothing_was_replayed_if_no_step_was_lost(clock):
    recovery, fields = recover(clock, restored_step=25, furthest_step=25)
    assert fields["replayed_steps"] == 0
    assert recovery.note_step(26) is None


def test_steps_before_all_ranks_are_ready_do_not_end_the_replay(clock):
    recovery = Recovery(failed_at=100.0, detect_s=None)
    recovery.note_ordered("start", 3)
    assert recovery.note_step(3) is None
