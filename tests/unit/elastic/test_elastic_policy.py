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
