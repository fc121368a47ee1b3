"""The interpreter: every action gets the result of its producer, in one process with a thread per rank."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest
import torch

from meshwright.parallel.pipeline.action_times import ActionTimes
from meshwright.parallel.pipeline.interpreter import Interpreter
from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.transfers import receiver_of
from meshwright.spec.layout import SCHEDULES

MICRO_BATCHES = 4


class Queues:
    """In place of P2P transfers: a queue per action."""

    def __init__(self, schedule, queues) -> None:
        self.schedule, self.queues, self.finished = schedule, queues, False

    def begin(self) -> None:
        self.finished = False

    def finish(self) -> None:
        self.finished = True

    def sends(self, action) -> bool:
        return receiver_of(action, self.schedule) is not None

    def send(self, action, result) -> None:
        self.queues[action].put(result)

    def receive(self, source) -> torch.Tensor:
        return self.queues[source].get(timeout=30)


class Recorder:
    """Computes nothing: a result names the action that it is from."""

    def __init__(self, stages: int) -> None:
        self.stages, self.ran = stages, []

    def forward(self, stage, micro_batch, x):
        assert (x is None) == (stage == 0)
        if x is not None:
            assert x.tolist() == [0, stage - 1, micro_batch]
        self.ran.append(Action(Kind.FORWARD, stage, micro_batch))
        return None if stage == self.stages - 1 else torch.tensor([0, stage, micro_batch])

    def backward(self, stage, micro_batch, grad):
        assert (grad is None) == (stage == self.stages - 1)
        if grad is not None:
            assert grad.tolist() == [1, stage + 1, micro_batch]
        self.ran.append(Action(Kind.BACKWARD, stage, micro_batch))
        return None if stage == 0 else torch.tensor([1, stage, micro_batch])

    def weight(self, stage, micro_batch):
        self.ran.append(Action(Kind.WEIGHT, stage, micro_batch))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_runs_once_in_order_with_the_result_of_its_producer(name):
    schedule = build_schedule(name, 2, MICRO_BATCHES)
    queues: dict[Action, Queue] = defaultdict(Queue)
    exchanges = [Queues(schedule, queues) for _ in range(2)]
    runners = [Recorder(schedule.stages) for _ in range(2)]
    times = [ActionTimes(row, torch.device("cpu")) for row in schedule.ranks]
    with ThreadPoolExecutor(2) as pool:
        ranks = [Interpreter(schedule, n, exchanges[n], times[n]) for n in range(2)]
        list(pool.map(lambda n: ranks[n].run(runners[n]), range(2)))
    for n, row in enumerate(schedule.ranks):
        assert runners[n].ran == list(row)
        assert exchanges[n].finished
        timed = times[n].rows()
        assert [Action(Kind(kind), stage, micro_batch) for kind, stage, micro_batch, *_ in timed] == list(row)
        spans = [time for _, _, _, start, end in timed for time in (start, end)]
        assert spans == sorted(spans), "actions do not overlap"
    assert all(queue.empty() for queue in queues.values()), "every result was received"


def test_steps_that_do_not_count_are_left_out_of_the_mean():
    actions = [Action(Kind.FORWARD, 0, 0)]
    times = ActionTimes(actions, torch.device("cpu"))
    for is_timed in (True, False, True):
        times.is_timed = is_timed
        times.begin()
        times.start()
        times.end()
        times.finish()
    assert times.steps == 2
