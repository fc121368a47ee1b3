"""The stragglers of a run in its record, its summary and its report."""

from __future__ import annotations

from meshwright.audit.record import RunRecord
from meshwright.report.event_text import EventText
from meshwright.report.html import _stragglers


def event(name, rank, **fields):
    return {"v": 1, "event": name, "time": 1.0, "rank": rank, "generation": 0, **fields}


def named(rank, step, action="none"):
    figures = {"lateness_s": 0.1, "share": 0.25, "slowdown": 1.5, "preempted": False}
    where = {"host": "node<1>", "phase": "compute", "since_step": step - 15, "step": step}
    return event("straggler", rank, **figures, **where, action=action)


def test_a_straggler_ends_with_its_recovery():
    record = RunRecord()
    record.feed(named(2, 40))
    record.feed(named(1, 50, action="replace"))
    assert [span.rank for span in record.stragglers.current] == [2, 1]
    record.feed(event("straggler_recovered", 2, since_step=25, step=70, replaced=False))
    record.feed(named(2, 90))
    spans = record.stragglers.spans
    assert [(s.rank, s.since_step, s.recovered_step) for s in spans] == [
        (2, 25, 70),
        (1, 35, None),
        (2, 75, None),
    ]
    assert (
        "rank 2 on node<1> was a straggler from step 25 to step 70: 1.50 times as long" in spans[0].sentence()
    )
    assert spans[1].sentence().startswith("rank 1 on node<1> was a straggler from step 35 to the end")
    assert record.stragglers.as_list()[1]["action"] == "replace"
    page = "".join(_stragglers(spans))
    assert page.count("node&lt;1&gt;") == 3


def test_a_preempted_straggler_says_so(plan):
    """Not the rank, but the machine is to blame."""
    record, event = RunRecord(), named(0, 40) | {"preempted": True}
    record.feed(event)
    (span,) = record.stragglers.spans
    says = "compute (preempted: other processes used its core)"
    assert says in span.sentence()
    assert says in "".join(_stragglers([span]))
    line = EventText(plan.job).describe(event)
    assert line is not None
    assert line.endswith(f"by {says}")


def test_a_run_without_stragglers_has_no_table():
    assert _stragglers(RunRecord().stragglers.spans) == []
