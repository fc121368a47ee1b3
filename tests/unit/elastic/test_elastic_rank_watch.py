"""Ages of heartbeats and of CPU time are measured by the watcher's clock, not by the ranks'."""

from __future__ import annotations

import os

import pytest

from meshwright.core import flight_ring as ring
from meshwright.core.flight_ring import FlightMemory
from meshwright.elastic.rank_watch import ProcessStatus, RankWatch


class Machine:
    """One rank, a clock and a process status that a test sets."""

    def __init__(self, timeout_s=5.0):
        self.now_s, self.status = 1000.0, ProcessStatus("S")
        self.memory = FlightMemory.create(0)
        self.watch = RankWatch(timeout_s, lambda: self.now_s, lambda _: self.status)
        self.watch.add(0, self.memory)
        self.write(0, ring.IDENTITY, ring.MAGIC, ring.VERSION, os.getpid(), 0, 0)
        self.beats(1)

    def write(self, offset, form, *values):
        os.pwrite(self.memory.fd, form.pack(*values), offset)

    def beats(self, at_ns):
        self.write(ring.BEAT_AT, ring.BEAT, at_ns, 1)

    def enters(self, phase, changes):
        self.write(ring.PROGRESS_AT, ring.PROGRESS, 1, ring.PHASES.index(phase), 1, changes)

    def runs(self, seconds, poll_s=0.5, beat=False):
        """Poll for a while; returns the first verdict and after how many seconds it came."""
        began = self.now_s
        while self.now_s < began + seconds:
            self.now_s += poll_s
            if beat:
                self.beats(int(self.now_s * 1e9))
            if (found := self.watch.poll()) is not None:
                return found.cause, self.now_s - began
        return None, seconds


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.watch.close()


def test_a_stopped_rank_is_found_within_the_timeout(machine):
    machine.status = ProcessStatus("T")
    cause, after_s = machine.runs(20)
    assert cause == "stopped"
    assert after_s <= 5.0


def test_a_rank_that_uses_cpu_time_without_a_heartbeat_is_not_silent(machine):
    """It holds the GIL, in a long call of an extension."""
    for tick in range(0, 100, 2):
        machine.status = ProcessStatus("R", tick)
        assert machine.runs(0.5)[0] is None


@pytest.mark.parametrize("status", [ProcessStatus("t"), ProcessStatus("S", has_children=True)])
def test_a_debugger_and_a_running_compiler_are_not_silence(machine, status):
    machine.status = status
    assert machine.runs(20)[0] is None


@pytest.mark.parametrize("jump_ns", [-60_000_000_000, 60_000_000_000])
def test_a_clock_of_the_rank_that_jumps_changes_nothing(machine, jump_ns):
    assert machine.runs(3, beat=True)[0] is None
    machine.beats(int(machine.now_s * 1e9) + jump_ns)
    assert machine.runs(3)[0] is None, "the value has changed: the rank is alive"


def test_a_pause_of_the_watcher_is_not_silence_of_the_rank(machine):
    """The launcher was stopped for a minute together with its ranks (Ctrl-Z)."""
    machine.runs(1, beat=True)
    assert machine.runs(60, poll_s=60)[0] is None


def test_a_stuck_rank_is_reported_once(machine):
    machine.enters("waiting for data", 1)
    cause, after_s = machine.runs(20, beat=True)
    assert cause == "data"
    assert after_s <= 5.0
    assert machine.runs(60, beat=True)[0] is None


def test_nothing_is_reported_while_phases_change(machine):
    for change in range(100):
        machine.enters("waiting for data", change)
        assert machine.runs(0.5, beat=True)[0] is None


def test_a_timeout_of_zero_reports_nothing():
    machine = Machine(timeout_s=0.0)
    machine.status = ProcessStatus("T")
    assert machine.runs(60)[0] is None
    assert machine.watch.judge(1.0).cause == "stopped", "asked for, it answers"
    machine.watch.close()


def test_a_finished_rank_is_not_watched(machine):
    machine.enters("finished", 9)
    machine.status = ProcessStatus("")
    assert machine.runs(20)[0] is None
