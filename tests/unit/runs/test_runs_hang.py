"""Which ranks ``find_hang`` watches, and when it refuses."""

from __future__ import annotations

import socket

import pytest

import meshwright as mw
from meshwright.core.events import EventWriter
from meshwright.core.flight_ring import FlightMemory
from meshwright.launch.lock import RunLock


@pytest.fixture
def started(tmp_path):
    """Write the ``started`` event of a rank in a generation."""

    def write(rank, generation, recorder, host=None):
        events = EventWriter(tmp_path / "events.jsonl", rank, generation)
        events.write("started", pid=1, host=host or socket.gethostname(), flight_recorder=recorder)
        events.close()

    return write


def refused(run_dir):
    with pytest.raises(mw.UserError) as caught:
        mw.find_hang(run_dir)
    return caught.value.problems[0].code


def test_ranks_of_an_earlier_attempt_are_not_watched(tmp_path, started, monkeypatch):
    """Two ranks trained first; the resume has one. The recorder of the other one is gone."""
    monkeypatch.setattr("meshwright.runs.hang.POLLS", 0)
    memory = FlightMemory.create(0)
    for rank in (0, 1):
        started(rank, 0, "/proc/1/fd/99999")
    started(0, 1, memory.path)
    with RunLock.take(tmp_path):
        assert not mw.find_hang(str(tmp_path)).is_hang
        started(1, 1, "/proc/1/fd/99999")
        assert refused(tmp_path) == "hang-not-running"
    memory.close()


def test_runs_that_cannot_be_watched_are_refused(tmp_path, started):
    """No run, not running, started by torchrun, on another host."""
    assert refused(tmp_path / "gone") == "run-missing"
    started(0, 0, None)
    assert refused(tmp_path) == "hang-not-running"
    with RunLock.take(tmp_path):
        assert refused(tmp_path) == "hang-no-recorder"
        started(0, 1, None, host="elsewhere")
        assert refused(tmp_path) == "hang-other-host"
