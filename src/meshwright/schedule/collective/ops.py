"""The collective operations: what each rank has before, and must have after."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum


class Op(StrEnum):
    """A collective operation, named as in ``torch.distributed``."""

    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    ALL_GATHER = "all_gather"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"


ROOTED = frozenset({Op.BROADCAST, Op.SCATTER, Op.GATHER, Op.REDUCE})
"""Operations with a root."""
REDUCING = frozenset({Op.REDUCE, Op.REDUCE_SCATTER, Op.ALL_REDUCE})
"""Operations that add."""


def blocks_before(op: Op, rank: int, ranks: int, root: int | None, blocks: int) -> Iterator[int]:
    """The blocks that a rank has before the operation."""
    if op in (Op.BROADCAST, Op.SCATTER):
        yield from range(blocks if rank == root else 0)
    elif op in (Op.GATHER, Op.ALL_GATHER):
        yield rank
    elif op is Op.ALL_TO_ALL:
        yield from range(rank * ranks, (rank + 1) * ranks)
    else:
        yield from range(blocks)


def blocks_after(op: Op, rank: int, ranks: int, root: int | None, blocks: int) -> Iterator[int]:
    """The blocks that a rank must have after the operation, each with all contributions."""
    if op in (Op.SCATTER, Op.REDUCE_SCATTER):
        yield rank
    elif op in (Op.GATHER, Op.REDUCE):
        yield from range(blocks if rank == root else 0)
    elif op is Op.ALL_TO_ALL:
        yield from range(rank, ranks * ranks, ranks)
    else:
        yield from range(blocks)


def contributors(op: Op, block: int, ranks: int, root: int | None) -> frozenset[int]:
    """The ranks whose data the result of a block is made of."""
    if op in REDUCING:
        return frozenset(range(ranks))
    if op in (Op.GATHER, Op.ALL_GATHER):
        return frozenset({block})
    if op is Op.ALL_TO_ALL:
        return frozenset({block // ranks})
    assert root is not None, f"{op} has a root"
    return frozenset({root})
