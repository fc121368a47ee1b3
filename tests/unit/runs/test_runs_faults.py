"""The pass criteria of the fault tests: each can fail. Schedules are a function of the seed."""

from __future__ import annotations

import json
import random

import pytest

from meshwright.core.errors import UserError
from meshwright.elastic.faults.injector import Injection
from meshwright.elastic.faults.schedule import (
    connect,
    corrupt_gradient,
    fail,
    parse_fault,
    shift_clock,
    slow,
    stop,
    stop_supervisor,
    wrong_collective,
)
from meshwright.runs.faults import criteria, suite
from meshwright.runs.faults.checks.check import CannotRunError, ViolationError
from meshwright.runs.faults.checks.table import CHECKS, Check
from meshwright.runs.faults.criteria import Figure, worst
from meshwright.runs.faults.job import LAYOUTS, TinyJob
from meshwright.runs.faults.suite import run_faults
from meshwright.runs.faults.table import TESTS
from meshwright.runs.faults.trial import Trial
from meshwright.runs.reporter import SILENT


def event(name, time, rank=0, generation=0, **fields):
    return {"event": name, "time": time, "rank": rank, "generation": generation, **fields}


STARTED = [event("started", 0.0, rank, pid=rank + 10) for rank in range(4)]
RECOVERY = [
    event("started", 10.3, 2, 1, pid=20),
    event("rank_lost", 10.2, failed_rank=2),
    event("recovered", 10.5, generation=1, seconds=0.4),
    event("step", 10.6, generation=1, step=6),
]


@pytest.fixture
def trial(tmp_path):
    """A trial with a fault at time 10, and the events that a test gives."""

    def build(fault, events):
        made = Trial(TinyJob(tmp_path), tmp_path / "run", (), [fault])
        made.view.events = list(events)
        made.injections.append(Injection(fault, 10.0, 12, 7, "backward", 0, 7))
        return made

    return build


def outcome(figures, trial):
    return all(figure.ok for figure in figures) and not trial.violations


@pytest.mark.parametrize(
    ("events", "passes"),
    [
        ([*STARTED, *RECOVERY], True),
        ([*STARTED], False),
        ([*STARTED, *RECOVERY[:3]], False),
        ([*STARTED, *RECOVERY, event("started", 11.0, 1, 1, pid=30)], False),
        ([*STARTED, *RECOVERY[:3], event("step", 20.6, generation=1, step=6)], False),
        (
            [
                *STARTED,
                RECOVERY[0],
                event("rank_lost", 11.5),
                event("recovered", 12.0, generation=1, seconds=0.5),
                event("step", 12.1, generation=1, step=6),
            ],
            False,
        ),
    ],
    ids=["recovered", "not recovered", "no step", "a bystander died", "too late", "noticed too late"],
)
def test_a_kill_passes_only_if_it_was_noticed_and_recovered_in_time(trial, events, passes):
    made = trial(fail(rank=2, step=7), events)
    assert outcome(criteria.evaluate_kills(made), made) == passes


@pytest.mark.parametrize(
    ("cause", "named_at", "rejoined", "passes"),
    [
        ("stopped", 14.0, True, True),
        ("stopped", 14.0, False, False),
        ("blocked", 14.0, True, False),
        ("stopped", 15.5, True, False),
    ],
)
def test_a_stopped_rank_passes_only_if_it_was_named_in_time_and_rejoins(
    trial, cause, named_at, rejoined, passes
):
    later = [{**e, "time": e["time"] + 5, "how": "stopped for 4.0 s, then fenced"} for e in RECOVERY]
    hang = event("hang", named_at, 2, cause=cause, verdict="")
    woke = [event("rejoined", 70.0, former_pid=12, pid=12)] if rejoined else []
    made = trial(stop(rank=2, step=7, for_s=60), [*STARTED, hang, *later, *woke])
    made.alive_at_end = {12}
    assert outcome(criteria.evaluate_stopped_ranks(made), made) == passes


@pytest.mark.parametrize(
    ("gap_s", "lost", "passes"), [(21.0, False, True), (23.0, False, False), (1.0, True, False)]
)
def test_a_stopped_supervisor_passes_only_without_a_stall_or_a_restart(trial, gap_s, lost, passes):
    events = [*STARTED, event("step", 10.1, step=8), event("step", 10.1 + gap_s, step=9)]
    made = trial(stop_supervisor(step=7, for_s=20), [*events, *([RECOVERY[1]] if lost else [])])
    assert outcome(criteria.evaluate_stopped_supervisor(made), made) == passes


NAMED = "rank 2 skipped all_reduce at wrong_call.py:51"


@pytest.mark.parametrize(
    ("text", "status", "injected", "named_at", "passes"),
    [
        (NAMED, 4, True, 14.5, True),
        (NAMED, 4, True, 15.5, False),
        (NAMED, 4, False, 14.5, False),
        (NAMED, 0, True, 14.5, False),
        ("rank 1 skipped all_reduce at wrong_call.py:51", 4, True, 14.5, False),
    ],
    ids=["named", "too late", "not injected", "no failure", "another rank"],
)
def test_a_wrong_call_passes_only_if_it_was_named_in_time(trial, text, status, injected, named_at, passes):
    """The time counts from the call, not from the step before it."""
    events = [*STARTED, event("step", 9.0, step=6), event("hang", named_at, cause="skipped")]
    made = trial(
        wrong_collective(rank=2, step=7, call="skip"),
        [*events, *([event("injected", 10.0)] if injected else [])],
    )
    made.status = status
    made.output.write_text(json.dumps({"errors": [{"message": text}]}))
    assert outcome(criteria.evaluate_wrong_call(made), made) == passes


@pytest.mark.parametrize(("shifted_s", "passes"), [(60.0, True), (0.0, False)])
def test_a_clock_test_fails_if_the_shift_had_no_effect(trial, shifted_s, passes):
    steps = [event("step", 11.0, step=8), event("step", 11.0 + shifted_s, rank=2, step=8)]
    made = trial(shift_clock(rank=2, step=7, by_s=60), [*STARTED, *steps])
    assert outcome(criteria.evaluate_clocks(made), made) == passes


SKIPPED = [event("skipped_update", 10.1, rank, step=6, unchanged=True) for rank in range(4)]
BAD = corrupt_gradient(rank=2, step=7, value="nan")
BAD_EVENTS = [
    event("injected", 10.0, 2, fault=str(BAD)),
    *SKIPPED,
    event("not_finite", 10.2, step=7, ranks=[2]),
    event("step", 10.3, step=7, bad_step="gradient norm"),
    event("step", 10.4, step=8, bad_step=None),
]


@pytest.mark.parametrize(
    ("events", "passes"),
    [
        (BAD_EVENTS, True),
        (BAD_EVENTS[1:], False),
        ([e for e in BAD_EVENTS if e is not SKIPPED[3]], False),
        ([e | {"unchanged": False} if e is SKIPPED[3] else e for e in BAD_EVENTS], False),
        ([e | {"ranks": [1]} if e["event"] == "not_finite" else e for e in BAD_EVENTS], False),
        ([*BAD_EVENTS, event("step", 10.5, step=9, bad_step="spike")], False),
    ],
    ids=["skipped", "not injected", "one rank went on", "state changed", "another rank", "one more"],
)
def test_a_bad_gradient_passes_only_if_all_ranks_skip_it_and_its_rank_is_named(trial, events, passes):
    made = trial(BAD, events)
    assert outcome(criteria.evaluate_bad_gradients(made), made) == passes


def test_all_numbers_of_the_list_have_a_test():
    """Test 25 concerns asynchronous training."""
    numbers = [test.number for test in (*TESTS, *CHECKS)]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) >= set(range(1, 25)) - {8}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_test_without_a_schedule_can_be_loaded(check):
    assert callable(check.load())


@pytest.fixture
def run_check(monkeypatch):
    """Run a test without a schedule, which does what it is told."""

    def run(work, budget_s=100.0):
        check = Check(99, "check", "criterion", "module:function", 5.0)
        monkeypatch.setattr(Check, "load", lambda _: work)
        monkeypatch.setattr(suite, "CHECKS", (check,))
        return run_faults(["check"], 3, budget_s, None, SILENT)

    return run


def test_a_violated_invariant_fails_and_can_be_run_again(run_check):
    def work(run):
        assert not list(run.folder.iterdir())
        raise ViolationError("a file is lost")

    found = run_check(work).as_dict()
    assert (found["failed"], found["violations"]) == (["check"], {"check": ["a file is lost"]})
    assert found["replay"] == {"check": "meshwright faults check --seed 3 --budget 3600"}


def test_figures_have_limits(run_check):
    report = run_check(lambda run: run.limit("error", 30, 25, "%"))
    assert (report.ok, report.as_dict()["violations"]) == (False, {"check": ["error 30% (<= 25)"]})
    report = run_check(lambda run: run.count("found", 100, 100))
    assert report.ok
    assert report.as_dict()["passed"] == ["check"]


def test_what_this_machine_lacks_skips_a_test_with_the_reason(run_check):
    def work(run):
        raise CannotRunError("strace is not installed")

    with pytest.raises(UserError, match=r"strace is not installed.*\[faults-budget\]"):
        run_check(work)


def test_a_seed_always_gives_the_same_random_numbers(run_check):
    drawn = []
    for _ in range(2):
        run_check(lambda run: drawn.append(run.random.random()))
    assert drawn[0] == drawn[1]


def test_an_attack_without_a_port_tests_nothing_and_fails(trial):
    made = trial(connect(step=7, connections=600), STARTED)
    criteria.evaluate_attack(made)
    assert made.violations == ["no listening port was found: nothing was tested"]


def test_the_worst_figure_of_each_name_counts():
    found = worst(
        [
            Figure("a", 1, 2),
            Figure("a", 3, 2),
            Figure("b", 90, 80, at_least=True),
            Figure("b", 70, 80, at_least=True),
        ]
    )
    assert [(figure.value, figure.ok) for figure in found] == [(3, False), (70, False)]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_schedules_are_a_function_of_the_seed_and_can_be_replayed_from_their_text(test, layout):
    first, again, other = (test.build(random.Random(seed), layout) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [[parse_fault(str(fault)) for fault in run] for run in first] == first


@pytest.mark.parametrize(
    "lines",
    [
        "fail(rank=4, step=3)",
        'wrong_collective(rank=1, step=4, call="skip")\nfail(rank=1, step=3)',
        'corrupt_gradient(rank=1, step=4, value="nan")\nfail(rank=1, step=3)',
    ],
)
def test_a_schedule_that_the_tiny_job_cannot_run_is_refused(tmp_path, lines):
    path = tmp_path / "faults.txt"
    path.write_text(lines)
    with pytest.raises(UserError, match="faults-schedule"):
        run_faults([], 0, 100.0, path, SILENT)


def straggler(time, rank=2, phase="compute", step=20):
    return event("straggler", time, rank, phase=phase, step=step, slowdown=1.6)


@pytest.mark.parametrize(
    ("events", "clean", "passes"),
    [
        ([*STARTED, straggler(11.0)], 500, True),
        ([*STARTED], 500, False),
        ([*STARTED, straggler(9.0, rank=1), straggler(11.0)], 500, False),
        ([*STARTED, straggler(11.0, rank=1)], 500, False),
        ([*STARTED, straggler(11.0, phase="data")], 500, False),
        ([*STARTED, straggler(11.0)], 499, False),
        ([*STARTED, straggler(11.0, step=40)], 500, False),
    ],
    ids=["named", "not named", "false alarm", "another rank", "another phase", "too few steps", "too late"],
)
def test_a_slow_rank_must_be_named(tmp_path, events, clean, passes):
    fault = slow(rank=2, step=501, factor=1.5, for_s=60)
    made = Trial(TinyJob(tmp_path), tmp_path / "run", (), [fault])
    shift = clean if clean == 499 else 500
    made.view.events = [{**e, "step": e["step"] + shift} if "step" in e else e for e in events]
    made.injections.append(Injection(fault, 10.0, 12, 501, "backward", 0, clean))
    assert outcome(criteria.evaluate_straggler(made), made) == passes


def test_a_slow_rank_is_a_sentence():
    fault = slow(rank=2, step=501, factor=1.5, for_s=60)
    assert parse_fault(str(fault)) == fault
    with pytest.raises(UserError, match=r"factor=0\.5.*\[faults-schedule\]"):
        parse_fault("slow(rank=2, step=5, factor=0.5, for_s=60)")
