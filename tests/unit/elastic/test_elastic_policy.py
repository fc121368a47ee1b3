"""The decision after a failure, as a table."""

from __future__ import annotations

import pytest

from meshwright.elastic.policy import Budget, Failure, decide


def killed(step: int) -> Failure:
    return Failure(1, "exited", "killed by SIGKILL", step)


def raised(step: int, message: str = "RuntimeError: no") -> Failure:
    return Failure(1, "raised", message, step)


def rollback(step: int) -> Failure:
    return Failure(1, "raised", "RollbackError: ", step, rollback=True)


@pytest.mark.parametrize(
    ("failure", "earlier", "restarts", "action"),
    [
        (killed(5), [], 3, "regroup"),
        (killed(5), [], 0, "give up"),
        (killed(5), [killed(5), killed(5)], 3, "regroup"),
        (killed(5), [killed(5), killed(5), killed(5)], 3, "give up"),
        (killed(6), [killed(5)] * 3, 3, "regroup"),
        (killed(40), [killed(step) for step in range(20)], 3, "regroup"),
        (raised(5), [], 3, "regroup"),
        (raised(5), [raised(5)], 3, "give up"),
        (raised(5), [raised(5, "RuntimeError: other")], 3, "regroup"),
        (raised(6), [raised(5)], 3, "regroup"),
        (Failure(0, "raised", "OutOfMemoryError: ", 5, refused=True), [], 3, "give up"),
        (rollback(5), [], 3, "regroup"),
        (rollback(5), [], 0, "give up"),
        (rollback(5), [rollback(5)] * 4, 3, "regroup"),
        (rollback(90), [rollback(step) for step in (10, 20, 30, 40, 50)], 3, "give up"),
    ],
)
def test_decision(failure, earlier, restarts, action):
    """New steps reset the count of failures; an equal error after the same step is not tried a third time.

    New steps do not reset the count of rollbacks.
    """
    assert decide(failure, earlier, Budget(restarts)).action == action


def lost_node(step: int) -> Failure:
    return Failure(1, "node", "the agent of node 1 (b) is gone", step)


@pytest.mark.parametrize(
    ("earlier", "budget", "action", "reason"),
    [
        ([], Budget(3, "wait", 60.0), "wait for a node", "another agent may join within 60 s"),
        ([], Budget(3, "give-up", 60.0), "give up", "elastic.policy=give-up ends the run"),
        ([], Budget(0, "wait", 60.0), "give up", "elastic.restarts is 0"),
        ([lost_node(4)], Budget(3, "wait", 60.0), "wait for a node", "another agent may join within 60 s"),
        (
            [killed(5), killed(5), killed(5)],
            Budget(3, "wait", 60.0),
            "give up",
            "4 failures without a new step; elastic.restarts=3",
        ),
    ],
)
def test_decision_after_a_lost_node(earlier, budget, action, reason):
    decision = decide(lost_node(5), earlier, budget)
    assert (decision.action, decision.reason) == (action, reason)


def test_the_policy_for_lost_nodes_does_not_change_other_decisions():
    for failure in (killed(5), raised(5)):
        assert decide(failure, [], Budget(3, "give-up", 60.0)).action == "regroup"


@pytest.mark.parametrize(
    ("budget", "waits_s", "missing"),
    [
        (Budget(3, "wait", 7.5), 7.5, "no other agent joined within elastic.node_wait_s=7.5"),
        (Budget(3, "give-up", 7.5), 0.0, "elastic.policy=give-up ends the run"),
    ],
)
def test_how_long_a_run_waits_for_a_node(budget, waits_s, missing):
    """Also for a node that is lost while the run waits for another one."""
    assert (budget.waits_for_node_s, budget.explain_missing_node()) == (waits_s, missing)


def on(device: str, step: int) -> Failure:
    return Failure(2, "exited", "killed by SIGKILL", step, device=device)


@pytest.mark.parametrize(
    ("failure", "earlier", "action"),
    [
        (on("a", 5), [on("a", 5)], "exclude"),
        (on("a", 5), [], "regroup"),
        (on("a", 5), [killed(5)], "give up"),  # another rank failed before
        (on("b", 5), [on("a", 5), on("a", 5)], "give up"),  # the job fails after this step on any device
        (on("b", 9), [on("a", 5), on("a", 5), on("b", 9)], "exclude"),
        (Failure(2, "node", "gone", 5, device="a"), [on("a", 5)], "give up"),
        (Failure(2, "node", "gone", 5, device="a"), [], "wait for a node"),
    ],
)
def test_a_device_that_fails_again_and_again_is_left_out_if_the_layout_may_change(failure, earlier, action):
    budget = Budget(1, "wait", 10.0, may_change=True)
    assert decide(failure, earlier, budget).action == action
    fixed = decide(failure, earlier, Budget(1, "wait", 10.0))
    assert fixed.action == ("give up" if action == "exclude" else action)
