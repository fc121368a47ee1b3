"""Goodput: where the time of a run went, over recoveries and resumes."""

from __future__ import annotations

import pytest

from meshwright.audit.record import RunRecord
from meshwright.report.generation_plot import draw_generations, list_spans
from meshwright.report.run_report import describe_goodput


def event(name, time, generation=0, **fields):
    return {"v": 1, "event": name, "time": time, "rank": 0, "generation": generation, **fields}


def step(number, time, generation=0, seconds=1.0):
    facts = {"loss": 1.0, "step_s": seconds, "mfu": 0.1, "tokens": 8}
    return event("step", time, generation, step=number, **facts)


def ready(time, generation, at):
    return event("ready", time, generation, step=at, steps=4, peak_basis="a matmul")


EVENTS = [
    event("started", 100.0),
    ready(104.0, 0, 0),
    step(1, 105.0),
    step(2, 106.0),
    event("eval", 106.5, step=2, loss=1.0, samples=1, seconds=0.5),
    step(3, 107.5),
    event("rank_lost", 108.0, failed_rank=1, how="killed", reason="x"),
    ready(110.5, 1, 1),
    step(2, 111.5, 1),
    step(3, 112.5, 1),
    event("checkpoint", 113.0, 1, step=3, path="c", bytes=1, seconds=0.25),
    event("finished", 113.5, 1, status="interrupted", step=3, steps=2),
    event("started", 500.0, 2),
    ready(503.0, 2, 3),
    step(4, 504.0, 2),
    event("finished", 504.0, 2, status="complete", step=4, steps=1),
]


@pytest.fixture
def record():
    """One recovery, from step 3 back to step 1; a stop after step 3, and a resume 386 s later."""
    found = RunRecord()
    for one in EVENTS:
        found.feed(one)
    return found


def test_every_second_has_a_cause(record):
    """The time between the attempts does not count; recovery counts from the last step that was done."""
    goodput = record.goodput
    assert goodput.wall_s == 13.5 + 4.0
    assert goodput.steps_s == 4.0
    assert goodput.lost_s == {
        "start-up": 4.0 + 3.0,
        "recovery": 110.5 - 107.5,
        "replayed steps": 2.0,
        "checkpoints": 0.25,
        "evaluation": 0.5,
        "other": pytest.approx(0.75),
    }
    assert goodput.share == pytest.approx(4.0 / 17.5)
    assert goodput.steps_s + sum(goodput.lost_s.values()) == pytest.approx(goodput.wall_s)
    assert describe_goodput(goodput).startswith("22.9% of 17.50 s; start-up 40.0%, recovery 17.1%")


def test_a_run_without_events_has_none():
    assert RunRecord().goodput is None


def test_an_attempt_that_never_trained_is_start_up():
    record = RunRecord()
    for one in (event("started", 10.0), event("error", 12.0, kind="X", message="x")):
        record.feed(one)
    assert record.goodput.lost_s["start-up"] == record.goodput.wall_s == 2.0


def test_generations_are_drawn_without_the_time_between_attempts(record):
    times = [record.clock.generations[number] for number in (0, 1, 2)]
    spans = [[(kind, begin, end) for kind, begin, end in row] for _, row in list_spans(times)]
    assert spans == [
        [("start-up", 0.0, 4.0), ("training", 4.0, 7.5)],
        [("recovery", 7.5, 10.5), ("training", 10.5, 13.5)],
        [("start-up", 13.5, 16.5), ("training", 16.5, 17.5)],
    ]
    figure = draw_generations(times)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"generation {n}" for n in range(3)]
    assert "steps 2 to 3" in [text.get_text() for text in axes.texts]


def test_a_checkpoint_that_is_written_beside_training_costs_the_time_that_it_blocks(record):
    """Its whole time overlaps with steps. The sums over all checkpoints are in the record."""
    costs = {"blocked_s": 0.5, "slowed_s": 2.0, "slowdown": 1.25, "waited_s": 0.25}
    record.feed(event("checkpoint", 504.0, 2, step=4, path="d", bytes=1, seconds=9.0, **costs))
    record.feed(event("checkpoint_waited", 504.0, 2, step=4, previous_step=3, waited_s=0.25))
    assert record.goodput.lost_s["checkpoints"] == 0.25 + 0.5
    found = record.saves.as_dict()
    assert (found["count"], found["blocked_s"], found["slowed_s"], found["slowdown"]) == (2, 0.75, 2.0, 1.25)
    assert record.saves.sentence() == (
        "2 saved; training blocked for 750.0 ms; steps 1.25 times as long while one is written "
        "(2.00 s in all); 1 save waited 250.0 ms for the one before"
    )
