"""The calls of a group: their order, errors, and futures."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest

from meshwright.parallel.shared_memory.work import Lane


@pytest.fixture
def lane():
    made = Lane("test", lambda wait: wait())
    yield made
    made.close()


def test_calls_run_in_order_and_a_synchronous_one_after_those_before_it(lane):
    ran, gate = [], threading.Event()
    first = lane.submit(lambda: (gate.wait(30), ran.append(1)), [])
    second = lane.submit(lambda: ran.append(2), [])
    assert not lane.run_now(lambda: ran.append(3))  # others are pending: it must be submitted
    third = lane.submit(lambda: ran.append(3), [])
    assert not first.is_completed()
    gate.set()
    assert third.wait()
    assert ran == [1, 2, 3]
    assert first.is_success()
    assert second.is_completed()


def test_a_synchronous_call_runs_in_the_thread_of_the_caller(lane):
    threads = []
    assert lane.run_now(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


def test_an_error_is_raised_by_wait_and_by_the_future(lane):
    def fail():
        raise RuntimeError("rank 1 has ended")

    work = lane.submit(fail, [])
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        work.wait()
    assert not work.is_success()
    for future in (work.get_future(), lane.submit(fail, []).get_future()):  # completed, and perhaps not yet
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            future.wait()


def test_a_callback_of_a_future_may_call_collectives(lane):
    ran = []

    def again(_):
        lane.submit(lambda: ran.append("queued"), [])
        assert lane.run_now(lambda: ran.append("synchronous"))
        return ran

    gate = threading.Event()
    work = lane.submit(lambda: gate.wait(30), ["result"])
    future = work.get_future().then(again)
    gate.set()
    assert future.wait() == ["queued", "synchronous"]


def test_a_callback_of_a_future_may_wait_for_an_asynchronous_call(lane):
    """The thread of the group runs both: it must not wait for itself."""
    gate = threading.Event()
    work = lane.submit(lambda: gate.wait(30), [])
    future = work.get_future().then(lambda _: lane.submit(lambda: None, []).wait())
    gate.set()
    assert future.wait() is True


def test_a_lane_that_is_closed_in_a_callback_ends_its_thread():
    lane = Lane("test", lambda wait: wait())

    def close(_):
        lane.close()
        return lane.run_now(lambda: None)

    gate = threading.Event()
    future = lane.submit(lambda: gate.wait(30), []).get_future().then(close)
    gate.set()
    assert future.wait() is True
    lane._thread.join(30)
    assert not lane._thread.is_alive()


def test_a_call_is_kept_until_it_is_waited_for(lane):
    """C++ keeps only the base of the Python object."""
    work = lane.submit(lambda: None, [])
    del work
    gc.collect()
    (kept,) = lane.works
    kept.wait()
    assert not lane.works


def test_a_callback_of_a_future_may_wait_for_the_future_of_another_call(lane):
    """As torch's PowerSGD hook does: the callback runs in the thread of the group."""
    gate = threading.Event()
    work = lane.submit(lambda: gate.wait(30), ["first"])
    future = work.get_future().then(lambda _: lane.submit(lambda: None, ["second"]).get_future().wait())
    gate.set()
    assert future.wait() == ["second"]


def test_a_call_that_is_only_polled_is_freed(lane):
    gate = threading.Event()
    work = lane.submit(lambda: gate.wait(30), [])
    assert not work.is_completed()
    assert lane.works == {work}
    gate.set()
    lane.submit(lambda: None, []).wait()
    assert work.is_completed()
    assert not lane.works


def test_a_timeout_of_wait_is_obeyed(lane):
    gate = threading.Event()
    work = lane.submit(lambda: gate.wait(30), [])
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.01 s"):
        work.wait(timedelta(seconds=0.01))
    gate.set()
    assert work.wait(timedelta(seconds=30))


def test_a_call_while_the_lane_is_closed_runs_at_once():
    """Nothing would ever run it otherwise."""
    lane, ran = Lane("test", lambda wait: wait()), []
    lane.submit(lambda: ran.append(1), []).wait()
    lane.close()
    assert lane.submit(lambda: ran.append(2), []).wait(timedelta(seconds=10))
    assert ran == [1, 2]
