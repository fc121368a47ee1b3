"""Which algorithm of a collective is fastest at which size and number of ranks, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.errors import Problem, UserError, require_argument
from meshwright.schedule.collective.build import SEGMENTED, build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.schedule.collective.steps import CollectiveSchedule
from meshwright.simulate.collective import simulate_collective
from meshwright.simulate.collective_links import Links, build_links
from meshwright.spec.cluster import Cluster

SIZES = tuple(1024 * 4**power for power in range(11))
"""1 KiB to 1 GiB."""
SEGMENTS = (1, 8, 32)
"""Numbers of segments that are tried along chains and trees; the fastest counts."""
LEAST_SEGMENT_BYTES = 4096
"""Smaller segments are not tried."""
EQUAL = 1e-3
"""Relative difference of times that count as equal."""
MAX_RANKS = 128
"""Ranks of a comparison: it simulates every algorithm at every size."""


@dataclass(frozen=True)
class AlgorithmTime:
    """One algorithm at one size."""

    ranks: int
    size_bytes: int
    algorithm: str
    segments: int
    time_s: float

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return vars(self) | {"algbw_bytes_per_s": self.size_bytes / self.time_s if self.time_s else None}


@dataclass(frozen=True)
class CollectiveComparison:
    """Times of all algorithms of an operation on a cluster."""

    op: str
    cluster: str
    rows: tuple[AlgorithmTime, ...]

    @property
    def ranks(self) -> list[int]:
        """Numbers of ranks, rising."""
        return sorted({row.ranks for row in self.rows})

    @property
    def sizes(self) -> list[int]:
        """Sizes in bytes, rising."""
        return sorted({row.size_bytes for row in self.rows})

    def fastest(self, ranks: int, size_bytes: int) -> AlgorithmTime:
        """The winner at a size and a number of ranks; of equal times the first in the table."""
        rows = [row for row in self.rows if (row.ranks, row.size_bytes) == (ranks, size_bytes)]
        least = min(row.time_s for row in rows)
        return next(row for row in rows if row.time_s <= least * (1 + EQUAL))

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright simulate collective --json``."""
        fastest = [self.fastest(ranks, size) for ranks in self.ranks for size in self.sizes]
        return {
            "op": self.op,
            "cluster": self.cluster,
            "rows": [row.as_dict() for row in self.rows],
            "fastest": [row.as_dict() for row in fastest],
        }


def compare_algorithms(
    op: str,
    cluster: Cluster,
    ranks: Sequence[int] = (),
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = (),
) -> CollectiveComparison:
    """Simulate every algorithm of an operation.

    Args:
        op: The operation.
        cluster: Where; rank r is on device r.
        ranks: Numbers of ranks; powers of two up to the whole cluster, 64 at most, if left out.
        sizes: Sizes of the tensor in bytes.
        algorithms: Only these; all of the operation if left out. Hierarchical needs several nodes.

    Raises:
        UserError: An argument does not fit.
    """
    known = list_algorithms(op)
    world = cluster.world_size
    chosen = ranks or [2**power for power in range(1, 7) if 2**power <= world] or [world]
    most = min(world, MAX_RANKS)
    require_argument(world > 1, "on", cluster.preset or "cluster", "has one device; a collective needs two")
    for count in chosen:
        if not 1 < count <= most:
            rule = f"must be 2 to {most} on this cluster"
            raise UserError(Problem("collective-ranks", rule, "ranks", count, is_argument=True))
    for size in sizes:
        require_argument(size > 0, "sizes", size, "must be at least 1 byte")
    for name in algorithms:
        require_argument(name in known, "algorithms", name, f"must be of {op}: {', '.join(known)}")
    rows = [
        row
        for count in sorted(set(chosen))
        for name in algorithms or known
        if name != "hierarchical" or count > cluster.devices_per_node > 1
        for row in _time_algorithm(op, name, count, cluster, sizes)
    ]
    rule = "runs on several nodes of several devices only; name another algorithm or a larger cluster"
    require_argument(bool(rows), "algorithms", "hierarchical", rule)
    name = f"{cluster.nodes}x{cluster.devices_per_node}x{cluster.preset or cluster.device_name}"
    return CollectiveComparison(op, name, tuple(rows))


def _time_algorithm(
    op: str, name: str, ranks: int, cluster: Cluster, sizes: Sequence[int]
) -> list[AlgorithmTime]:
    """The best number of segments at each size."""
    per_node = cluster.devices_per_node if name == "hierarchical" else None
    tried = SEGMENTS if (Op(op), name) in SEGMENTED else SEGMENTS[:1]
    schedules = {n: build_collective(op, name, ranks, ranks_per_node=per_node, segments=n) for n in tried}
    links = build_links(cluster, ranks)
    found = []
    for size in sizes:
        fitting = [n for n in tried if n == 1 or size >= n * LEAST_SEGMENT_BYTES]
        times = {n: _time_s(schedules[n], size, links) for n in fitting}
        best = min(times, key=lambda n: times[n])
        found.append(AlgorithmTime(ranks, size, name, best, times[best]))
    return found


def _time_s(schedule: CollectiveSchedule, size_bytes: int, links: Links) -> float:
    return simulate_collective(schedule, size_bytes, links).time_s
