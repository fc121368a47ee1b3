"""The memory through which ranks of one host exchange collectives: its size and its parts, by process group.

The planner adds its size to the CPU memory of a node; the ranks use the same offsets. A region of a process
group has a counter per rank and four buffers of one slot per rank. Pages that no collective touches are not
allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.layout.process_groups import P2P_AXES, list_process_groups
from meshwright.spec.job import Job

PAGE = 4096
LINE = 64
"""Bytes between two counters, so that ranks do not write to the same cache line."""
BUFFERS = 4
"""A rank may write one chunk ahead, and the slowest rank may still read the chunk before."""
REGION_BYTES = 16 << 20
"""Buffers of one process group, all its ranks together: they stay in the last-level cache."""
MOST_SLOT_BYTES = 512 << 10
LEAST_SLOT_BYTES = 64 << 10


@dataclass(frozen=True)
class Region:
    """The memory of one process group."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    offset: int
    slot_bytes: int

    @property
    def data_offset(self) -> int:
        """Where the buffers begin."""
        return self.offset + control_bytes(len(self.ranks))

    @property
    def end(self) -> int:
        """Where the next region begins."""
        return self.data_offset + BUFFERS * len(self.ranks) * self.slot_bytes


def control_bytes(size: int) -> int:
    """Bytes of the counters of a group, in whole pages."""
    return -(-size * LINE // PAGE) * PAGE


def slot_bytes(size: int) -> int:
    """Bytes that one rank of a group writes at a time."""
    slot = REGION_BYTES // BUFFERS // size // PAGE * PAGE
    least = max(LEAST_SLOT_BYTES, control_bytes(size))  # a cache line for each rank
    return max(least, min(MOST_SLOT_BYTES, slot))


def region_bytes(size: int) -> int:
    """Memory of a group of this size."""
    return Region(tuple(range(size)), 0, slot_bytes(size)).end


def list_regions(groups: Iterable[Iterable[int]]) -> list[Region]:
    """The regions of process groups, one after the other."""
    regions: list[Region] = []
    for group in groups:
        ranks = tuple(group)
        offset = regions[-1].end if regions else 0
        regions.append(Region(ranks, offset, slot_bytes(len(ranks))))
    return regions


def collective_bytes(job: Job, ranks: Iterable[int]) -> int:
    """Memory for the collectives of process groups whose ranks are all among these, on one node."""
    here = set(ranks)
    groups = [list(range(job.layout.world_size))]
    groups += [group for axis, found in list_process_groups(job) if axis not in P2P_AXES for group in found]
    return sum(region_bytes(len(group)) for group in groups if len(group) > 1 and here.issuperset(group))
