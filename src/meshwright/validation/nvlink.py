"""Rings over the NVLinks of a node without a switch.

In a hybrid cube mesh (DGX-1 with V100) the number of rings depends on which GPUs take part. A ring passes
every GPU once and uses one link of each pair on its way, in one direction; links are full duplex, so that a
cycle of links carries two rings.
"""

from __future__ import annotations

from functools import cache
from itertools import permutations

DGX1_V100 = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between each pair of GPUs of a DGX-1. Those of GPUs 0 and 1 are in NVIDIA/nccl#671."""


@cache
def count_rings(gpus: int) -> int:
    """The most rings that the first GPUs of a DGX-1 with V100 can have at the same time."""
    if gpus == 2:
        return DGX1_V100[0][1]
    cycles = [
        pairs
        for rest in permutations(range(1, gpus))
        if rest[0] < rest[-1]
        for pairs in [_pairs((0, *rest))]
        if all(DGX1_V100[a][b] for a, b in pairs)
    ]
    links = {(a, b): DGX1_V100[a][b] for a in range(gpus) for b in range(a + 1, gpus)}
    return 2 * _pack(links, cycles)


def _pairs(cycle: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    steps = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
    return tuple((min(step), max(step)) for step in steps)


def _pack(links: dict[tuple[int, int], int], cycles: list[tuple[tuple[int, int], ...]]) -> int:
    """The most cycles that share no link; every GPU has 6 links, so 3 at most."""
    best = 0
    for index, cycle in enumerate(cycles):
        if all(links[pair] for pair in cycle):
            left = {pair: count - (pair in cycle) for pair, count in links.items()}
            best = max(best, 1 + _pack(left, cycles[index:]))
            if best == min(sum(n for p, n in links.items() if g in p) for g in range(len(cycle))) // 2:
                break
    return best
