"""Operations that are timed while the same runs on all cores."""

from __future__ import annotations

import threading

import pytest

from meshwright.verify.bench.machine import WARM_UP
from meshwright.verify.bench.operations import COUNTER_FILE, AllCoresTimer, Cores, Operations, Task

SHAPES = Operations("fp32", [(4, 4, 4)], [(1, 2, 2, 4, 8)], 16, 64)


@pytest.fixture
def folder(tmp_path):
    """A run folder for three ranks."""
    Task(SHAPES, 0.01, ["plan.toml"], 3).write(tmp_path)
    return tmp_path


def test_task_is_read_back(folder):
    task = Task.read(folder)
    assert (task.seconds, task.plans, task.world_size) == (0.01, ["plan.toml"], 3)
    assert [tuple(sizes) for sizes in task.operations.gemms] == list(SHAPES.gemms)


def test_the_other_ranks_repeat_a_call_until_rank_0_has_measured_it(folder):
    """Three calls by each rank; no rank is in the next one while rank 0 measures."""
    active, mixed, calls = [set() for _ in range(3)], [], [[0] * 3 for _ in range(3)]
    times, repeated = [[], [], []], threading.Condition()

    def others_repeat(number):
        return min(calls[1][number], calls[2][number]) > WARM_UP

    def run(rank):
        timer = AllCoresTimer(Cores(folder / COUNTER_FILE, rank, 3), 0.05)
        for number in range(3):

            def call(number=number):
                with repeated:
                    active[number].add(rank)
                    calls[rank][number] += 1
                    if any(rank in others for others in active[number + 1 :]):
                        mixed.append((rank, number))
                    repeated.notify_all()
                    if rank == 0 and calls[0][number] > WARM_UP:
                        assert repeated.wait_for(lambda: others_repeat(number), 20)

            times[rank].append(timer.time(call))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not mixed
    assert all(others_repeat(number) for number in range(3)), "they do more than to warm up"
    assert times[1] == times[2] == [1.0] * 3
    assert len(times[0]) == 3
    assert all(seconds >= 0 for seconds in times[0])
