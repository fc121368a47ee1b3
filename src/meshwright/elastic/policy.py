"""What to do after a rank has failed: a pure function of the failure, the earlier ones and the budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.units import format_plural
from meshwright.spec.job import LostNodePolicy

GIVES_UP = "elastic.policy=give-up ends the run"

MAX_ROLLBACKS = 5
"""Rollbacks of one command after bad steps; the next one ends the run."""


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
    """Whether another attempt would fail in the same way: a user error, out of memory, a loss that is not
    finite."""
    rollback: bool = False
    """Whether a bad step asks for a rollback: the ranks go on with later samples."""
    device: str = ""
    """Device of the rank; rank numbers change with the layout."""


@dataclass(frozen=True)
class Budget:
    """Limits on recoveries: the settings of ``elastic``."""

    restarts: int = 0
    """Failures in a row without a new step; 0: the first one ends the run."""
    on_lost_node: LostNodePolicy = "wait"
    """``elastic.policy``."""
    node_wait_s: float = 0.0
    """How long another agent of a lost node may take to join."""
    may_change: bool = False
    """Whether the run may go on in another layout, with fewer devices."""

    @property
    def waits_for_node_s(self) -> float:
        """How long the run waits after the loss of a node."""
        return self.node_wait_s if self.on_lost_node == "wait" else 0.0

    def explain_missing_node(self) -> str:
        """Why a run ends whose lost node was not replaced."""
        if self.on_lost_node == "give-up" and not self.may_change:
            return GIVES_UP
        return f"no other agent joined within elastic.node_wait_s={self.waits_for_node_s:g}"


@dataclass(frozen=True)
class Decision:
    """The decision and its reason."""

    action: Literal["regroup", "wait for a node", "exclude", "give up"]
    """``exclude``: go on in another layout, without the device of the failed rank."""
    reason: str


def decide(failure: Failure, earlier: Sequence[Failure], budget: Budget) -> Decision:
    """Decide whether the run goes on.

    Args:
        failure: The newest.
        earlier: Those before it in this run, oldest first.
        budget: Budget of the run.
    """
    restarts = budget.restarts
    if failure.refused:
        return Decision("give up", "another attempt would fail alike")
    if restarts == 0:
        return Decision("give up", "elastic.restarts is 0")
    if failure.rollback:
        return _decide_rollback(earlier)
    if failure.kind == "raised" and any(_is_same(failure, before) for before in earlier):
        return Decision("give up", f"the same error as before, after {format_plural(failure.step, 'step')}")
    since_step = [failure, *itertools.takewhile(lambda f: f.step >= failure.step, reversed(earlier))]
    in_a_row = len(since_step)
    if in_a_row > restarts:
        reason = f"{in_a_row} failures without a new step; elastic.restarts={restarts}"
        # Failures of another device after the same step: the job fails, not a device.
        same_device = all((f.rank, f.device) == (failure.rank, failure.device) for f in since_step)
        same_device &= failure.kind != "node"
        return Decision("exclude" if budget.may_change and same_device else "give up", reason)
    if failure.kind == "node" and budget.on_lost_node == "give-up" and not budget.may_change:
        return Decision("give up", GIVES_UP)
    if failure.kind == "node":
        return Decision("wait for a node", f"another agent may join within {budget.node_wait_s:g} s")
    return Decision("regroup", f"failure {in_a_row} of at most {restarts} without a new step")


def _decide_rollback(earlier: Sequence[Failure]) -> Decision:
    rollbacks = 1 + sum(before.rollback for before in earlier)
    if rollbacks > MAX_ROLLBACKS:
        return Decision("give up", f"{MAX_ROLLBACKS} rollbacks before")
    return Decision("regroup", f"rollback {rollbacks} of at most {MAX_ROLLBACKS}")


def _is_same(failure: Failure, before: Failure) -> bool:
    return (before.kind, before.message, before.step) == (failure.kind, failure.message, failure.step)
