"""The audit of rank placement: where each rank ran, against the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.audit.record import GenerationRecord, RunRecord
from meshwright.plan.contract import PlanContract


@dataclass(frozen=True)
class PlacementRow:
    """One rank of one generation: its planned and its reported device."""

    rank: int
    planned_node: int
    planned_device: int
    host: str
    node: int | None
    """None if the launcher does not number nodes."""
    device: int | None
    generation: int

    @property
    def ok(self) -> bool:
        """Whether the rank ran where it was planned."""
        here = self.node in (None, self.planned_node)
        return here and self.device in (None, self.planned_device)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "ok": self.ok}

    def describe_difference(self) -> str:
        """The difference as a sentence."""
        where = f"device {self.device} of node {self.node} ({self.host})"
        planned = f"device {self.planned_device} of node {self.planned_node}"
        return f"generation {self.generation}, rank {self.rank}: ran on {where}, planned on {planned}"


def list_placement_rows(
    audited: Sequence[tuple[PlanContract, GenerationRecord]], record: RunRecord
) -> list[PlacementRow]:
    """The ranks that reported where they run, generation by generation.

    Args:
        audited: The generations, each with its plan.
        record: Record of the run; has the devices of layouts that followed another one.
    """
    rows: list[PlacementRow] = []
    for plan, generation in audited:
        planned = record.placements.get(generation.attempt_start) or plan.rank_placement.as_pairs()
        rows += [
            PlacementRow(rank, *planned[rank], place.host, place.node, place.device, generation.generation)
            for rank, place in sorted(generation.places.items())
            if rank < len(planned)
        ]
    return rows


def list_placement_differences(rows: Sequence[PlacementRow]) -> list[str]:
    """A sentence per rank that ran elsewhere, and per node whose ranks ran on several hosts."""
    found = [row.describe_difference() for row in rows if not row.ok]
    hosts: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        if row.node is not None:
            hosts.setdefault((row.generation, row.node), set()).add(row.host)
    found += [
        f"generation {generation}: the ranks of node {node} ran on several hosts: {', '.join(sorted(names))}"
        for (generation, node), names in hosts.items()
        if len(names) > 1
    ]
    return found
