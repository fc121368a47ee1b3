"""How often the gradient of each replica was used, in a run with backup replicas.

Steps that a later generation replayed count twice: the replicas computed them twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from meshwright.core.units import format_plural

_SLICE = re.compile(rb'"slice":(\d+|null)[,}]')


@dataclass(frozen=True)
class UsedSlices:
    """How often the gradients of one rank were used."""

    rank: int
    backup: bool
    own: int
    """Steps that used its gradient of its own slice; 0 for a backup, which has none."""
    taken_over: int
    """Steps that used its gradient of a slice of another rank."""
    unused: int
    """Steps that used none of its gradients: others finished the slice first."""

    @property
    def steps(self) -> int:
        """Steps that it took part in."""
        return self.own + self.taken_over + self.unused


@dataclass
class SliceLog:
    """Counts of the slices by rank."""

    counts: Counter[tuple[int, int | None]] = field(default_factory=Counter)
    """Steps by rank and the slice whose gradient was used; None: none was used."""

    def read(self, rank: int, line: bytes) -> None:
        """Take in the line of a step; lines of runs without backup replicas have no slice."""
        if (found := _SLICE.search(line)) is not None:
            self.add(rank, None if found[1] == b"null" else int(found[1]))

    def add(self, rank: int, which: int | None) -> None:
        """Count a step of a rank and the slice for which its gradient was used."""
        self.counts[rank, which] += 1

    def list_ranks(self, replicas: int, backups: int) -> list[UsedSlices]:
        """One row per rank; none if nothing was counted.

        Args:
            replicas: All of them, with the backups.
            backups: The last replicas.
        """
        if not self.counts:
            return []
        found = []
        for rank in range(replicas):
            mine = {which: count for (of, which), count in self.counts.items() if of == rank}
            backup = rank >= replicas - backups
            own = 0 if backup else mine.get(rank, 0)
            unused = mine.get(None, 0)
            found.append(UsedSlices(rank, backup, own, sum(mine.values()) - own - unused, unused))
        return found


def describe_slices(rows: Sequence[UsedSlices]) -> str:
    """Describes the share of gradients from backups, and the rank whose slices were taken over most."""
    used = sum(row.own + row.taken_over for row in rows)
    by_backups = sum(row.taken_over for row in rows if row.backup)
    slowest = max((row for row in rows if not row.backup), key=lambda row: row.unused / max(1, row.steps))
    text = f"{by_backups} of {format_plural(used, 'slice')} from backups"
    if not slowest.unused:
        return f"{text}; no rank was late"
    return f"{text}; rank {slowest.rank} was late most often, in {slowest.unused} of {slowest.steps} steps"


def list_slices(rows: Sequence[UsedSlices]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [asdict(row) for row in rows]
