"""The messages about a failed rank, as tables: for the policy, for events, and as the error of the run."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from meshwright.core.errors import Problem
from meshwright.elastic.failure_report import (
    FailureReport,
    describe_hang,
    report_lost_node,
    report_wrong_call,
)
from meshwright.elastic.hang import Verdict
from meshwright.elastic.rank_view import RankView

HERE = socket.gethostname()
STOPPED = Verdict("stopped", "rank 1 is stopped", 1, since_s=3.84, step=7)
SKIPPED = Verdict("skipped", "rank 0 skipped all_reduce", 0, since_s=2.0, step=7)
NO_DATA = Verdict("data", "rank 0 waits for data", 0, since_s=4.0, step=7)
REFUSED = Problem("data-empty", "has no samples", path="data.path", value="text", fix="Use other data")
LOST = report_lost_node("node 1 (b)")
NO_CHECKPOINT = "there is no checkpoint yet; set checkpoint.every_steps to save them"
CHECKPOINT = "resume the run to continue from the last checkpoint"


def raised(message="boom\nmore", problems=()):
    """What a rank reports that raised an exception."""
    return {"kind": "RuntimeError", "message": message, "problems": [*problems], "peer_lost": False}


def test_a_rollback_is_not_refused_and_reads_as_its_bad_step():
    problem = Problem("train-not-finite", "is nan at step 7; nothing was saved since", path="gradient norm")
    found = report(failure=raised(problems=[problem.as_dict()]) | {"rollback_position": 96})
    assert found.how() == "gradient norm is nan at step 7"
    failure = found.classify()
    assert (failure.kind, failure.refused, failure.rollback) == ("raised", False, True)


def report(hang=None, node=0, saved=False, reason="", **rank):
    view = RankView(1, alive=False, **rank)
    host = "b" if node else HERE
    return FailureReport(view, hang, 4, 7, node, host, Path("run/logs/rank-1.log"), saved, reason)


CASES = [
    (report(exit_status=-9), "killed by SIGKILL", ("exited", "killed by SIGKILL", False)),
    (report(fenced=True, hang=NO_DATA), "fenced", ("exited", "fenced", False)),
    (report(exit_status=-40), "killed by signal 40", ("exited", "killed by signal 40", False)),
    (report(failure=raised("")), "RuntimeError", ("raised", "RuntimeError: ", False)),
    (report(exit_status=3), "exit status 3", ("exited", "exit status 3", False)),
    (
        report(failure=raised()),
        "RuntimeError: boom",
        ("raised", "RuntimeError: boom\nmore", False),
    ),
    (
        report(failure=raised(), exit_status=1),
        "exit status 1: RuntimeError: boom",
        ("raised", "RuntimeError: boom\nmore", False),
    ),
    (
        report(failure=raised(problems=[REFUSED.as_dict()])),
        "RuntimeError: boom",
        ("raised", "RuntimeError: boom\nmore", True),
    ),
    (
        report(STOPPED, fenced=True),
        "stopped for 3.8 s, then fenced",
        ("silent", "stopped for 3.8 s, then fenced", False),
    ),
    (
        report(STOPPED, exit_status=-9),
        "stopped for 3.8 s, then killed",
        ("silent", "stopped for 3.8 s, then killed", False),
    ),
    (report(NO_DATA, exit_status=-9), "killed by SIGKILL", ("exited", "killed by SIGKILL", False)),
    (report(SKIPPED, exit_status=-6), "killed by SIGABRT", ("raised", "rank 0 skipped all_reduce", True)),
    (
        report(node=1, failure=LOST),
        "the agent of node 1 (b) is gone",
        ("node", "the agent of node 1 (b) is gone", False),
    ),
    (
        report(node=0, failure=report_lost_node("node 0")),
        "the agent of node 0 is gone",
        ("exited", "the agent of node 0 is gone", False),
    ),
]


@pytest.mark.parametrize(("failed", "how", "facts"), CASES)
def test_how_a_rank_failed_and_what_the_policy_gets(failed, how, facts):
    """A lost agent of this machine is replaced at once, so its ranks count as ended processes."""
    failure = failed.classify()
    assert failed.how() == how
    assert (failure.kind, failure.message, failure.refused) == facts
    assert (failure.rank, failure.step) == (1, 7)


DIED = f"rank 1 of 4 on {HERE} died"
LOG = "Its output is in run/logs/rank-1.log"
STEP = {"event": "step", "step": 7, "time": 100.0}


@pytest.mark.parametrize(
    ("failed", "code", "rule", "fix"),
    [
        (
            report(exit_status=-9),
            "run-rank-died",
            f"{DIED} (killed by SIGKILL); it sent no event",
            f"{LOG}; {NO_CHECKPOINT}",
        ),
        (
            report(exit_status=3, last_event=STEP, saved=True),
            "run-rank-died",
            f"{DIED} (exit status 3); its last event was 'step' of step 7, 2.5 s ago",
            f"{LOG}; {CHECKPOINT}",
        ),
        (
            report(failure=raised(), last_event={"event": "started", "time": 102.0}),
            "run-rank-died",
            f"{DIED} (RuntimeError: boom); its last event was 'started', 0.5 s ago",
            f"{LOG}; {NO_CHECKPOINT}",
        ),
        (
            report(NO_DATA, exit_status=-9),
            "run-rank-died",
            f"{DIED} (killed by SIGKILL); it sent no event; rank 0 waits for data",
            f"{LOG}; {NO_CHECKPOINT}",
        ),
        (
            report(STOPPED, fenced=True, saved=True),
            "run-hang",
            f"The run on {HERE} hangs: rank 1 is stopped",
            f"The output of the ranks is in run/logs; {CHECKPOINT}",
        ),
        (
            report(node=1, failure=LOST, reason="elastic.policy=give-up ends the run"),
            "run-node-lost",
            "the agent of node 1 (b) is gone; elastic.policy=give-up ends the run",
            f"See the output of its command and its logs; {NO_CHECKPOINT}",
        ),
    ],
)
def test_error_of_the_run(failed, code, rule, fix):
    problem = failed.problem(now=102.5)
    assert (problem.code, problem.rule, problem.fix) == (code, rule, fix)


def test_the_error_of_a_rank_is_that_of_the_run():
    assert report(failure=raised(problems=[REFUSED.as_dict()])).problem(0.0) == REFUSED


def test_a_hang_of_an_earlier_step_is_not_reported():
    """The run went on after it."""
    before = Verdict("data", "rank 0 waits for data", 0, step=6)
    assert "waits for data" not in report(before, exit_status=-9).problem(0.0).rule


def test_an_illegal_instruction_has_a_hint():
    problem = report(exit_status=-signal.SIGILL).problem(0.0)
    assert problem.fix.startswith("A kernel used an instruction")
    assert problem.fix.endswith(f"{LOG}; {NO_CHECKPOINT}")


def test_a_wrong_call_is_reported_with_the_error_of_a_hang():
    message = report_wrong_call(SKIPPED, Path("run/logs"), saved=False)
    assert Problem.from_dict(message["problems"][0]) == describe_hang(SKIPPED, Path("run/logs"), saved=False)
    assert (message["message"], message["peer_lost"]) == (SKIPPED.verdict, False)
