"""The own time of a rank: phases without waits, also those of DDP's reducer; time without a CPU apart."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.measure import own_time
from meshwright.measure.own_time import (
    OwnTime,
    ProcessTime,
    RunQueue,
    estimate_uncontended_s,
    read_process_time,
)

SECOND = 1_000_000_000


@pytest.fixture
def own(monkeypatch):
    """Own time whose clock and run queue a test sets, in seconds."""
    monkeypatch.setattr(own_time.time, "monotonic_ns", lambda: clock["now"])
    monkeypatch.setattr(RunQueue, "read_ns", lambda self: clock["queued"])
    clock = {"now": 100 * SECOND, "queued": 5 * SECOND}
    found = OwnTime()
    found.clock = clock

    def at(now, queued=None):
        clock["now"] = int((100 + now) * SECOND)
        clock["queued"] = clock["queued"] if queued is None else int((5 + queued) * SECOND)
        return clock["now"]

    found.at = at
    return found


def test_each_phase_counts_to_its_kind(own):
    own.enter("waiting for data", own.at(0))
    own.enter("forward", own.at(1))
    own.enter("update", own.at(3))
    own.enter("checkpoint", own.at(4))
    own.at(4.5)
    assert own.take() == {"compute": 3.0, "data": 1.0, "storage": 0.5, "preempted": 0.0, "waiting": 0.0}
    own.at(5)
    assert own.take()["storage"] == 0.5, "since the last report"


def test_a_wait_is_no_own_time(own):
    own.enter("forward", own.at(0))
    own.begin_wait(own.at(1))
    own.end_wait(own.at(4))
    own.at(5)
    assert own.take() == {"compute": 2.0, "data": 0.0, "storage": 0.0, "preempted": 0.0, "waiting": 3.0}


def test_the_reducer_waits_from_its_last_bucket_to_the_end_of_the_backward_pass(own):
    own.enter("backward", own.at(0))
    own.issue(own.at(1), in_backward=True)
    own.issue(own.at(2), in_backward=True)
    own.enter("waiting for data", own.at(5))
    own.enter("backward", own.at(5))
    own.enter("update", own.at(6))
    assert own.take() == {"compute": 3.0, "data": 0.0, "storage": 0.0, "preempted": 0.0, "waiting": 3.0}


def test_a_collective_that_python_waits_for_is_not_waited_for_twice(own):
    own.enter("backward", own.at(0))
    own.issue(own.at(1), in_backward=True)
    own.begin_wait(own.at(2))
    own.end_wait(own.at(3))
    own.enter("update", own.at(6))
    assert own.take()["waiting"] == 1.0


def test_an_asynchronous_collective_in_another_phase_is_no_wait(own):
    own.enter("forward", own.at(0))
    own.issue(own.at(1), in_backward=False)
    own.enter("backward", own.at(3))
    assert own.take()["compute"] == 3.0


def test_time_without_a_cpu_is_taken_off_the_compute_time(own):
    """Not that of waits: the rank would not have worked."""
    own.enter("forward", own.at(0))
    own.begin_wait(own.at(2, queued=0.5))
    own.end_wait(own.at(4, queued=1.5))
    own.at(5, queued=1.75)
    found = own.take()
    assert (found["compute"], found["preempted"], found["waiting"]) == (2.25, 0.75, 2.0)


def test_the_run_queue_of_this_thread_grows_when_another_process_has_its_cpu():
    """Two busy processes on one CPU: this one is ready and does not run."""
    if not Path(own_time.SCHEDSTAT).exists():
        pytest.skip("the system does not count the run queue")
    before = os.sched_getaffinity(0)
    cpu = min(before)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    queue = RunQueue()
    try:
        os.sched_setaffinity(busy.pid, {cpu})
        os.sched_setaffinity(0, {cpu})
        began, deadline = queue.read_ns(), time.monotonic() + 20
        while queue.read_ns() - began < SECOND / 20:
            assert time.monotonic() < deadline, "nothing was counted"
    finally:
        os.sched_setaffinity(0, before)
        busy.kill()
        busy.wait()
        queue.close()


def test_a_system_without_the_file_counts_nothing(monkeypatch):
    monkeypatch.setattr(own_time, "SCHEDSTAT", "/nowhere")
    queue = RunQueue()
    assert queue.read_ns() == 0
    queue.close()


def test_idle_time_comes_from_the_least_disturbed_repetitions():
    """Less the time in run queues; but threads that wait at the same time do not count twice."""
    wall_s = [2.0, 1.1, 3.0, 5.0]
    spent = [ProcessTime(0.9, queued) for queued in (1.0, 0.1, 2.0, 3.5)]
    assert estimate_uncontended_s(wall_s, spent) == pytest.approx(1.0)
    assert estimate_uncontended_s([2.0], [ProcessTime(1.5, 1.8)]) == 1.5
    assert estimate_uncontended_s([2.0], [ProcessTime(1.5, 0.0)]) == 2.0


def test_process_time_is_that_of_all_threads():
    before = read_process_time()
    thread = threading.Thread(target=lambda: sum(range(3_000_000)))
    thread.start()
    thread.join()
    spent = read_process_time().since(before)
    assert spent.cpu_s > 0.001
