"""What a run does with stragglers: names them, and by policy lets another process take the rank.

``replace`` is limited: each replacement costs a recovery, and does not help if the device is slow and not the
process. The supervisor feeds the ``step`` events of all ranks, writes the events that it gets back, and
carries out the actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from meshwright.core.events import Event
from meshwright.elastic.stragglers import Straggler, StragglerWatch
from meshwright.spec.job import Job, StragglerPolicy

MAX_REPLACEMENTS = 3
"""Replaced stragglers in one command."""
STEPS_BETWEEN = 200
"""Steps after which the same rank may be replaced again."""


@dataclass(frozen=True)
class StragglerEvent:
    """An event for the log of the run, and what to do with the rank."""

    name: Literal["straggler", "straggler_recovered"]
    fields: dict[str, Any]
    """With ``rank``."""
    action: Literal["none", "replace", "exclude"] = "none"


class StragglerHandling:
    """Stragglers of a run: detection and policy."""

    def __init__(self, peers: Sequence[Sequence[int]] = (), policy: StragglerPolicy = "warn") -> None:
        """Start without history.

        Args:
            peers: All ranks, in sets of equal work; none: no straggler is named.
            policy: ``elastic.straggler``.
        """
        self._watch, self._policy = StragglerWatch(peers), policy
        self._replaced: dict[int, int] = {}
        """Step of the last replacement, by rank."""
        self._replacements = 0

    def feed(self, event: Event) -> list[StragglerEvent]:
        """Take a ``step`` event; returns what to write and to do."""
        findings = self._watch.feed(
            event["rank"], event["generation"], event["step"], event.get("spent_s"), event.get("links")
        )
        return [
            StragglerEvent("straggler", {**asdict(one), "action": action}, action)
            if isinstance(one, Straggler) and (action := self._choose(one))
            else StragglerEvent("straggler_recovered", {**asdict(one), "replaced": False})
            for one in findings
        ]

    def _choose(self, found: Straggler) -> Literal["none", "replace", "exclude"]:
        """The action of the policy; ``none`` if its limit is reached or another process does not help."""
        if self._policy == "replace" and found.phase == "communication":
            return "none"
        if self._policy == "exclude":
            return "exclude"
        last = self._replaced.get(found.rank)
        too_soon = last is not None and found.step < last + STEPS_BETWEEN
        if self._policy == "warn" or too_soon or self._replacements >= MAX_REPLACEMENTS:
            return "none"
        self._replacements += 1
        self._replaced[found.rank] = found.step
        return "replace"

    def note_replaced(self, rank: int, step: int) -> list[StragglerEvent]:
        """A rank has a new process."""
        gone = self._watch.forget(rank, step)
        return [StragglerEvent("straggler_recovered", {**asdict(one), "replaced": True}) for one in gone]


def build_straggler_handling(job: Job) -> StragglerHandling:
    """For the ranks of a job: those of a pipeline stage have equal work.

    With expert parallelism the work depends on the router: each rank is compared with its own first steps.
    Backup replicas work until all samples of a step are done, and delay no other rank: they are not compared.
    """
    layout = job.layout
    per_stage = layout.world_size // layout.pp
    stages = [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(layout.pp)]
    if layout.ep > 1:
        stages = [range(rank, rank + 1) for rank in range(layout.world_size)]
    if layout.backup_replicas:
        stages = [range(layout.data_degree)]
    return StragglerHandling(stages if layout.world_size > 1 else (), job.elastic.straggler)
