"""The decision after a failure, as a table."""

from __future__ import annotations

import pytest

from meshwright.elastic.policy import Failure, decide


def killed(step: int) -> Failure:
    return Failure(1, "exited", "killed by SIGKILL", step)


def raised(step: int, message: str = "RuntimeError: no") -> Failure:
    return Failure(1, "raised", message, step)


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
    ],
)
def test_decision(failure, earlier, restarts, action):
    """New steps reset the count of failures; an equal error after the same step is not tried a third time."""
    assert decide(failure, earlier, restarts).action == action


def lost_node(step: int) -> Failure:
    return Failure(1, "node", "the agent of node 1 (b) is gone", step)


@pytest.mark.parametrize(
    ("earlier", "restarts", "node_wait_s", "action"),
    [
        ([], 3, 60.0, "wait for a node"),
        ([], 3, 0.0, "give up"),
        ([], 0, 60.0, "give up"),
        ([lost_node(4)], 3, 60.0, "wait for a node"),
        ([killed(5), killed(5), killed(5)], 3, 60.0, "give up"),
    ],
)
def test_decision_after_a_lost_node(earlier, restarts, node_wait_s, action):
    assert decide(lost_node(5), earlier, restarts, node_wait_s).action == action
