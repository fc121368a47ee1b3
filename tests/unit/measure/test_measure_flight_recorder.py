"""The flight recorder of a rank: its heartbeat, and the line at which the main thread is."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from types import FunctionType

import pytest

from meshwright.core.flight_ring import FLIGHT_VARIABLE, FlightMemory
from meshwright.measure import flight_recorder
from meshwright.measure.flight_recorder import FlightRecorder, in_background


def wait_for_beat(memory):
    """Wait in the main thread until the heartbeat has changed."""
    before, deadline = memory.progress().heartbeat_ns, time.monotonic() + 20
    while memory.progress().heartbeat_ns == before:
        assert time.monotonic() < deadline, "the heartbeat has ended"
        time.sleep(0.01)  # polls another thread


def without_lines(function):
    """The function as torch.compile may generate one: its frames have no line."""
    return FunctionType(function.__code__.replace(co_linetable=b""), function.__globals__)


@pytest.mark.parametrize("wait", [wait_for_beat, without_lines(wait_for_beat)], ids=["lines", "no lines"])
def test_the_heartbeat_goes_on_and_names_the_source(wait, monkeypatch):
    """A heartbeat that ends with an error makes the run take a rank that waits for a silent one."""
    memory = FlightMemory.create(0)
    monkeypatch.setenv(FLIGHT_VARIABLE, memory.path)
    recorder = FlightRecorder()
    try:
        recorder.start(0, 0)
        wait(memory)
        wait(memory)
        file, _, line = memory.progress().source.rpartition(":")
        first = wait.__code__.co_firstlineno
        assert file.endswith("test_measure_flight_recorder.py")
        assert first <= int(line) <= first + 5
    finally:
        recorder.stop()
        memory.close()


@pytest.fixture
def recorder_and_memory(monkeypatch):
    """A recorder whose heartbeats a test gives, and its memory."""
    memory = FlightMemory.create(0)
    monkeypatch.setenv(FLIGHT_VARIABLE, memory.path)
    monkeypatch.setattr(flight_recorder.ring, "HEARTBEAT_S", 1000)
    recorder = FlightRecorder()
    try:
        recorder.start(0, 0)
        yield recorder, memory
    finally:
        recorder.stop()
        memory.close()


def test_a_heartbeat_does_not_keep_the_variables_of_a_call_that_has_ended(recorder_and_memory, monkeypatch):
    """The tensors of a forward pass would live longer than it: the audited step would need more memory."""
    recorder, _ = recorder_and_memory
    named, ended = threading.Event(), threading.Event()

    def shorten(file):
        named.set()
        assert ended.wait(20)
        return file

    monkeypatch.setattr(flight_recorder, "_shorten", shorten)

    def call():
        variable = threading.Event()  # stands for a tensor
        heartbeat = threading.Thread(target=recorder._beat)
        heartbeat.start()
        assert named.wait(20)
        return heartbeat, weakref.ref(variable)

    heartbeat, variable = call()
    kept = variable() is not None
    ended.set()
    heartbeat.join()
    assert not kept


def test_heartbeats_look_at_no_frame_of_a_rank_that_goes_on_while_memory_is_measured(
    recorder_and_memory, monkeypatch
):
    """One that makes no progress is looked at: it may be stuck, and a report names its line."""
    recorder, memory = recorder_and_memory
    looks = []
    current_frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: looks.append(1) or current_frames())

    def beat():
        looks.clear()
        recorder._beat()
        return len(looks), "test_measure_flight_recorder" in memory.progress().source

    assert beat() == (1, True)
    with recorder.measuring_memory():
        recorder.enter("forward", 2)
        assert beat() == (0, False)
        recorder.enter("backward")
        assert beat() == (0, False)
        assert beat() == (1, True)
    recorder.enter("update")
    assert beat() == (1, True)


def test_waits_of_a_background_thread_are_not_waits_of_the_rank():
    """A thread that runs collectives for the rank must not hide who is slow: only the rank waits."""
    recorder = FlightRecorder()
    recorder.enter("backward")
    recorder.own_time.take()
    with in_background():
        recorder.observe(lambda: time.sleep(0.02))
    assert recorder.own_time.take()["waiting"] == 0
    recorder.observe(lambda: time.sleep(0.02))
    assert recorder.own_time.take()["waiting"] >= 0.02
    recorder.note_issued()  # the reducer waits from here to the end of the backward pass
    time.sleep(0.02)
    recorder.enter("update")
    assert recorder.own_time.take()["waiting"] >= 0.02
