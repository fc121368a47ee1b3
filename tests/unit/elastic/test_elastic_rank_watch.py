"""Ages of heartbeats and of CPU time are measured by the watcher's clock, not by the ranks'."""

from __future__ import annotations

import json
import os
import time

import pytest

from meshwright.core import flight_ring as ring
from meshwright.core.flight_ring import FlightMemory, RemoteFlight
from meshwright.elastic.rank_watch import NodeWatch, ProcessStatus, RankWatch


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


def test_a_rank_that_is_stopped_again_in_the_next_generation_is_reported_again(machine):
    """The replayed step has the same number."""
    machine.status = ProcessStatus("T")
    assert machine.runs(20)[0] == "stopped"
    assert machine.runs(20)[0] is None
    machine.write(0, ring.IDENTITY, ring.MAGIC, ring.VERSION, os.getpid(), 0, 1)
    assert machine.runs(20)[0] == "stopped"


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


class OtherMachine:
    """A rank on another machine, whose monotonic clock is an hour ahead, and the supervisor's watch."""

    def __init__(self):
        self.now_s = 1000.0
        self.memory = FlightMemory.create(0)
        self.there, self.watch = NodeWatch(), RankWatch(5.0, lambda: self.now_s)
        self.there.add(0, self.memory)
        self.watch.add(0, RemoteFlight())
        os.pwrite(self.memory.fd, ring.IDENTITY.pack(ring.MAGIC, ring.VERSION, os.getpid(), 0, 0), 0)
        self.clock_ns, self.status = time.monotonic_ns() + 3600 * 10**9, ["S", 0, False]
        self.beats()

    def beats(self):
        os.pwrite(self.memory.fd, ring.BEAT.pack(self.clock_ns, 1), ring.BEAT_AT)

    def runs(self, seconds, beat, reports=True):
        """Half a second at a time; returns the first verdict."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.clock_ns += 500_000_000
            if beat:
                self.beats()
            if reports:
                report = json.loads(json.dumps(self.there.report()))
                report |= {"now_ns": self.clock_ns, "passed_s": 0.5}
                report["ranks"]["0"]["status"] = self.status
                self.watch.receive(report)
            if (found := self.watch.poll()) is not None:
                return found
        return None

    def close(self):
        self.there.close()
        self.watch.close()


@pytest.fixture
def other_machine():
    made = OtherMachine()
    yield made
    made.close()


def test_a_rank_of_another_machine_that_beats_is_alive(other_machine):
    assert other_machine.runs(4, beat=True) is None


def test_a_stopped_rank_of_another_machine_is_found(other_machine):
    """Its age is measured there: the clocks of the machines differ by an hour."""
    other_machine.runs(2, beat=True)
    other_machine.status = ["T", 0, False]
    found = other_machine.runs(20, beat=False)
    assert (found.cause, found.rank) == ("stopped", 0)
    assert 2 <= found.since_s <= 6


def test_a_rank_does_not_age_while_its_agent_sends_nothing(other_machine):
    """A lost connection is not silence of the rank: nothing is killed."""
    other_machine.runs(1, beat=True)
    assert (
        other_machine.runs(60, beat=False, reports=False) is None
        or not other_machine.watch.judge(5.0).ends_run
    )


def test_all_records_are_sent_only_of_ranks_without_progress(other_machine):
    first, second = (len(other_machine.there.report()["ranks"]["0"]["flight"]) for _ in range(2))
    os.pwrite(other_machine.memory.fd, ring.PROGRESS.pack(7, 1, 1, 3), ring.PROGRESS_AT)
    third = len(other_machine.there.report()["ranks"]["0"]["flight"])
    assert first < second > third
