"""The supervisor's view of a run: its state, and what it knows of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshwright.core.events import Event
from meshwright.launch.channel import Message
from meshwright.launch.exits import EXIT_OK, EXIT_PEER_LOST


class State(Enum):
    """State of a run."""

    WAITING = "waiting"
    """Until the agents of all nodes are there: before the first generation, and after one was lost."""
    STARTING = "starting"
    """Ranks join the first generation."""
    RUNNING = "running"
    HALTING = "halting"
    """A rank failed; the others leave their collectives."""
    REGROUPING = "regrouping"
    """Ranks join the next generation."""
    FAILED = "failed"
    """The ranks are told to exit."""
    FINISHED = "finished"
    CHANGING = "changing"
    """The ranks are told to exit: the run goes on in another layout."""


@dataclass
class RankView:
    """The supervisor's view of a rank."""

    rank: int
    alive: bool
    """Whether it has a process."""
    exit_status: int | None = None
    fenced: bool = False
    """Whether its process was fenced: it does not answer, and may wake up."""
    failure: Message | None = None
    """Its report, if it left the generation."""
    failed_at: float = 0.0
    """Time of its failure, by the supervisor's monotonic clock."""
    last_event: Event = field(default_factory=dict)
    peak_flops_per_s: float | None = None
    """Matmul peak of its device, once it was ready; its replacement does not measure it again."""
    replaced: bool = False
    """Whether its process was killed as a straggler, so that another one takes the rank."""

    @property
    def has_left_generation(self) -> bool:
        """Whether it is no longer in its collectives: it has ended, or reported a failure."""
        return not self.alive or self.failure is not None

    @property
    def failed(self) -> bool:
        """Whether it did not end as it should."""
        return self.fenced or self.failure is not None or self.exit_status not in (None, EXIT_OK)

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because another rank did."""
        return self.exit_status == EXIT_PEER_LOST or bool(self.failure and self.failure["peer_lost"])


def first_failed(failed: Sequence[RankView]) -> RankView:
    """The rank that failed first is the likely cause; others lost their peer."""
    return min(failed, key=lambda rank: (rank.lost_peer, rank.failed_at))
