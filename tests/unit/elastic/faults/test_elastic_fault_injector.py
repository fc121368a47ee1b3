"""The injector sends a signal to a real process when its flight recorder shows the step and the phase."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from meshwright.core.flight_ring import RankProgress
from meshwright.elastic.faults.injector import STEPS_BETWEEN, Injector, is_alive
from meshwright.elastic.faults.run_view import RankProcess, RunView
from meshwright.elastic.faults.schedule import fail, stop
from meshwright.elastic.rank_watch import ProcessStatus


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as running:
        yield running
        running.kill()


class FakeView(RunView):
    """A run with one rank, whose flight recorder a test sets."""

    def at(self, pid, step, phase="forward"):
        self.ranks[1] = RankProcess(pid, None)
        self.here = RankProgress(pid, 1, 0, 0, "", step, phase, 0, 0, 0, 0, "")
        return self

    def progress(self, rank):
        return self.here if rank == 1 else None


def wait_for_stop(pid, stopped):
    deadline = time.monotonic() + 10
    while (ProcessStatus.read(pid).state == "T") != stopped:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def view(tmp_path, process):
    return FakeView(tmp_path).at(process.pid, 6)


def test_a_rank_is_killed_in_the_phase_of_the_step_and_not_before(view, process):
    injector = Injector(view, [fail(rank=1, step=7, during="backward")])
    for step, phase in ((6, "backward"), (7, "forward")):
        view.at(process.pid, step, phase)
        injector.poll()
        assert not injector.injections
        assert process.poll() is None
    view.at(process.pid, 7, "backward")
    injector.poll()
    assert process.wait(10) == -signal.SIGKILL
    (injection,) = injector.injections
    assert (injection.pid, injection.step, injection.phase) == (process.pid, 7, "backward")
    assert injector.done


def test_a_rank_that_left_the_phase_goes_on(view, process, monkeypatch):
    """It is stopped to look again, and continued."""
    reads = iter(("backward", "update"))
    monkeypatch.setattr(view, "progress", lambda _: replace(view.here, step=7, phase=next(reads)))
    injector = Injector(view, [fail(rank=1, step=7, during="backward")])
    injector.poll()
    assert not injector.injections
    wait_for_stop(process.pid, stopped=False)
    assert process.poll() is None


def test_a_pipeline_records_one_phase_for_forward_and_backward(view, process):
    view.at(process.pid, 7, "forward and backward")
    Injector(view, [fail(rank=1, step=7, during="backward")]).poll()
    assert process.wait(10) == -signal.SIGKILL


def test_a_stopped_process_is_continued_after_its_time(view, process):
    injector = Injector(view.at(process.pid, 7), [stop(rank=1, step=7, for_s=0)])
    injector.poll()
    wait_for_stop(process.pid, stopped=True)
    assert not injector.done
    injector.poll()
    wait_for_stop(process.pid, stopped=False)
    assert injector.done


def test_the_next_fault_waits_until_the_run_goes_on(view, process):
    """A recorder of a dead process still shows the step: nothing is injected there."""
    injector = Injector(view.at(process.pid, 9), [fail(rank=1, step=7), fail(rank=1, step=8)])
    injector.poll()
    process.wait(10)
    assert not is_alive(process.pid)
    done = injector.injections[0].furthest_step
    assert done == 8, "a rank in step 9 has done 8, although no event of a step was read"
    view.steps_done = done + STEPS_BETWEEN
    injector.poll()
    assert len(injector.injections) == 1, "the process is dead"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as successor:
        view.at(successor.pid, 9)
        view.steps_done = done + STEPS_BETWEEN - 1
        injector.poll()
        assert len(injector.injections) == 1, "no new steps"
        view.steps_done = done + STEPS_BETWEEN
        injector.poll()
        assert successor.wait(10) == -signal.SIGKILL
