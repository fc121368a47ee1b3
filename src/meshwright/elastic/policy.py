"""What to do after a rank has failed: a pure function of the failure, the earlier ones and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.units import format_plural


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, which ended a generation."""

    rank: int
    kind: Literal["exited", "raised", "silent", "node"]
    """``raised``: an exception. ``exited``: the process ended. ``silent``: it no longer answers. ``node``:
    the agent of its node is lost, with its ranks and their snapshots."""
    message: str
    step: int
    """Steps that the run had done at most."""
    refused: bool = False
    """Whether another attempt would fail alike: a user error, out of memory, a loss that is not finite."""


@dataclass(frozen=True)
class Decision:
    """The decision and its reason."""

    action: Literal["regroup", "wait for a node", "give up"]
    reason: str


def decide(failure: Failure, earlier: Sequence[Failure], restarts: int, node_wait_s: float = 0.0) -> Decision:
    """Decide whether the run goes on.

    Args:
        failure: The newest.
        earlier: Those before it in this run, oldest first.
        restarts: Failures in a row that are allowed without a new step.
        node_wait_s: How long the run may wait for another agent of a lost node.
    """
    if failure.refused:
        return Decision("give up", "another attempt would fail alike")
    if restarts == 0:
        return Decision("give up", "elastic.restarts is 0")
    if failure.kind == "raised" and any(_is_same(failure, before) for before in earlier):
        return Decision("give up", f"the same error as before, after {format_plural(failure.step, 'step')}")
    in_a_row = 1
    for before in reversed(earlier):
        if before.step < failure.step:
            break
        in_a_row += 1
    if in_a_row > restarts:
        return Decision("give up", f"{in_a_row} failures without a new step; elastic.restarts={restarts}")
    if failure.kind == "node" and node_wait_s == 0:
        return Decision("give up", "elastic.node_wait_s is 0")
    if failure.kind == "node":
        return Decision("wait for a node", f"another agent may join within {node_wait_s:g} s")
    return Decision("regroup", f"failure {in_a_row} of at most {restarts} without a new step")


def _is_same(failure: Failure, before: Failure) -> bool:
    return (before.kind, before.message, before.step) == (failure.kind, failure.message, failure.step)
