"""Builds a collective schedule by operation and algorithm, after checking the request.

:data:`PAIRS` is the table of all operations and algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.core.errors import Problem, UserError
from meshwright.schedule.collective import naive, recursive, ring, tree
from meshwright.schedule.collective.hierarchical import (
    Groups,
    grid_columns,
    grid_rows,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_all_to_all,
    hierarchical_broadcast,
    hierarchical_reduce_scatter,
    hierarchical_scatter,
    split_groups,
)
from meshwright.schedule.collective.ops import ROOTED, Op
from meshwright.schedule.collective.rounds import Chunks, Rounds
from meshwright.schedule.collective.steps import CollectiveSchedule, Combine

ALGORITHMS = (
    "naive",
    "ring",
    "tree",
    "double_tree",
    "recursive_doubling",
    "halving_doubling",
    "hierarchical",
    "2d",
)
MAX_RANKS = 512
"""A ring all-reduce on this many ranks has half a million messages."""
MAX_RANKS_ALL_TO_ALL = 128
"""All-to-all has a chunk for each pair of ranks."""
GROUPED = ("hierarchical", "2d")
"""Algorithms over groups of ranks."""


@dataclass(frozen=True)
class Request:
    """Arguments of an algorithm."""

    order: tuple[int, ...]
    """All ranks, in the order of the ring; the root first, if there is one."""
    root: int | None
    segments: int
    groups: Groups

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.order)

    @property
    def shards(self) -> list[Chunks]:
        """Block r for rank r, one chunk each."""
        return [(rank,) for rank in self.order]

    @property
    def pieces(self) -> list[Chunks]:
        """The segments of the tensor."""
        return [(segment,) for segment in range(self.segments)]

    def pair(self, source: int, target: int) -> Chunks:
        """The chunk of an all-to-all from a source for a target."""
        return (source * self.ranks + target,)


@dataclass(frozen=True)
class Generated:
    """Messages, and the chunks that they refer to."""

    rounds: Rounds
    blocks: int
    parts: int = 1


Generator = Callable[[Request], Generated]
Whole = Callable[[Sequence[int], Sequence[Chunks]], Rounds]
"""A generator over a group and the segments of a tensor, or the shards of the members."""


def _per_segment(build: Whole, chunks_per_segment: int = 1) -> Generator:
    """A generator for a tensor split into segments."""

    def generate(r: Request) -> Generated:
        chunks = [(chunk,) for chunk in range(r.segments * chunks_per_segment)]
        return Generated(build(r.order, chunks), len(chunks))

    return generate


def _per_rank(build: Whole) -> Generator:
    """A generator for a tensor split into one block per rank."""
    return lambda r: Generated(build(r.order, r.shards), r.ranks)


def _reversed(generator: Generator, combine: Combine) -> Generator:
    def generate(r: Request) -> Generated:
        found = generator(r)
        return Generated(found.rounds.reverse(combine), found.blocks, found.parts)

    return generate


def _joined(first: Generator, second: Generator) -> Generator:
    def generate(r: Request) -> Generated:
        before, after = first(r), second(r)
        return Generated(before.rounds.then(after.rounds), after.blocks, after.parts)

    return generate


def _per_pair(build: Callable[[Sequence[int], naive.Pair], Rounds]) -> Generator:
    return lambda r: Generated(build(r.order, r.pair), r.ranks**2)


def _halving_doubling_all_reduce(r: Request) -> Generated:
    blocks = recursive.largest_power_of_two(r.ranks)
    shards = [(block,) for block in range(blocks)]
    return Generated(recursive.halving_doubling_all_reduce(r.order, shards), blocks)


def _hierarchical(op: Op, groups: Groups, r: Request, part: int, parts: int) -> Generated:
    """One of ``parts`` parts of every block, over these groups."""
    root = r.order[0] if r.root is None else r.root
    lanes = max(map(len, groups))

    def chunks(block: int) -> Chunks:
        return (block * parts + part,)

    def by_owner(k: int, j: int) -> Chunks:
        return chunks(groups[k][j]) if j < len(groups[k]) else ()

    def by_lane(k: int, j: int) -> Chunks:
        return chunks(j * len(groups) + k)  # the chunks of a lane are contiguous

    if op is Op.ALL_REDUCE:
        return Generated(hierarchical_all_reduce(groups, by_lane), lanes * len(groups), parts)
    if op is Op.REDUCE_SCATTER:
        return Generated(hierarchical_reduce_scatter(groups, by_owner), r.ranks, parts)
    if op is Op.ALL_GATHER:
        return Generated(hierarchical_all_gather(groups, by_owner), r.ranks, parts)
    if op is Op.ALL_TO_ALL:
        pairs = hierarchical_all_to_all(groups, lambda s, t: chunks(s * r.ranks + t))
        return Generated(pairs, r.ranks**2, parts)
    if op in (Op.BROADCAST, Op.REDUCE):
        down, blocks = hierarchical_broadcast(groups, root, [chunks(0)]), 1
        return Generated(down if op is Op.BROADCAST else down.reverse(Combine.REDUCE), blocks, parts)
    down = hierarchical_scatter(groups, root, chunks)
    return Generated(down if op is Op.SCATTER else down.reverse(Combine.COPY), r.ranks, parts)


def _over_groups(op: Op) -> Generator:
    return lambda r: _hierarchical(op, r.groups, r, 0, 1)


def _over_grid(op: Op) -> Generator:
    def generate(r: Request) -> Generated:
        rows = _hierarchical(op, r.groups, r, 0, 2)
        columns = _hierarchical(op, grid_columns(r.groups), r, 1, 2)
        return Generated(rows.rounds.beside(columns.rounds), rows.blocks, 2)

    return generate


def _list_pairs() -> dict[Op, dict[str, Generator]]:
    """Every operation, and the algorithms that it has."""
    copy, reduce = Combine.COPY, Combine.REDUCE
    naive_broadcast = _per_segment(naive.naive_broadcast)
    naive_all_gather = _per_rank(naive.naive_all_gather)
    ring_all_gather = _per_rank(ring.ring_all_gather)
    ring_reduce_scatter = _per_rank(ring.ring_reduce_scatter)
    broadcast = {
        "naive": naive_broadcast,
        "ring": _per_segment(ring.ring_broadcast),
        "tree": _per_segment(tree.tree_broadcast),
        "double_tree": _per_segment(tree.double_tree_broadcast, 2),
        "recursive_doubling": _per_segment(recursive.binomial_broadcast),
    }
    scatter = {
        "naive": _per_rank(naive.naive_scatter),
        "ring": _per_rank(ring.ring_scatter),
        "tree": _per_rank(tree.tree_scatter),
        "halving_doubling": _per_rank(recursive.binomial_scatter),
    }
    doubling_all_gather = _per_rank(recursive.doubling_all_gather)
    pairs = {
        Op.BROADCAST: broadcast | {"halving_doubling": _per_rank(recursive.halving_doubling_broadcast)},
        Op.SCATTER: scatter,
        Op.GATHER: {name: _reversed(generator, copy) for name, generator in scatter.items()}
        | {"ring": _per_rank(ring.ring_gather)},
        Op.ALL_GATHER: {
            "naive": naive_all_gather,
            "ring": ring_all_gather,
            "recursive_doubling": doubling_all_gather,
        },
        Op.REDUCE: {name: _reversed(generator, reduce) for name, generator in broadcast.items()}
        | {
            "ring": _per_segment(ring.ring_reduce),
            "halving_doubling": _per_rank(recursive.halving_doubling_reduce),
        },
        Op.REDUCE_SCATTER: {
            "naive": _reversed(naive_all_gather, reduce),
            "ring": ring_reduce_scatter,
            "halving_doubling": _reversed(doubling_all_gather, reduce),
        },
        Op.ALL_REDUCE: {
            "naive": _joined(_reversed(naive_broadcast, reduce), naive_broadcast),
            "ring": _joined(ring_reduce_scatter, ring_all_gather),
            "tree": _per_segment(tree.tree_all_reduce),
            "double_tree": _per_segment(tree.double_tree_all_reduce, 2),
            "recursive_doubling": _per_segment(recursive.doubling_all_reduce),
            "halving_doubling": _halving_doubling_all_reduce,
        },
        Op.ALL_TO_ALL: {
            "naive": _per_pair(naive.naive_all_to_all),
            "ring": _per_pair(ring.ring_all_to_all),
            "recursive_doubling": _per_pair(recursive.bruck_all_to_all),
        },
    }
    return {
        op: found | {"hierarchical": _over_groups(op), "2d": _over_grid(op)} for op, found in pairs.items()
    }


PAIRS = _list_pairs()
"""The generator of each operation and algorithm."""
SEGMENTED = {
    (op, algorithm)
    for op in (Op.BROADCAST, Op.REDUCE, Op.ALL_REDUCE)
    for algorithm in ("ring", "tree", "double_tree")
} - {(Op.ALL_REDUCE, "ring")}
"""Pairs that pipeline segments of the tensor along a chain or tree."""


def build_collective(
    op: str,
    algorithm: str,
    ranks: int,
    *,
    root: int = 0,
    ranks_per_node: int | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    order: Sequence[int] | None = None,
    segments: int = 1,
) -> CollectiveSchedule:
    """Generate a collective schedule.

    Args:
        op: A collective operation, such as ``all_reduce``.
        algorithm: One of :data:`ALGORITHMS` that the operation has.
        ranks: Number of ranks. One rank: an empty schedule.
        root: Root of broadcast, scatter, gather and reduce.
        ranks_per_node: Ranks per node of ``hierarchical``: consecutive ranks of a node. Of ``2d``: row
            length of the grid; as square as possible if left out.
        groups: The ranks of each node (or row of the grid), instead of ``ranks_per_node``.
        order: The ranks in ring order, of the algorithms without groups; 0 to ``ranks - 1`` if left out.
        segments: Segments that are pipelined along a chain or tree, of :data:`SEGMENTED`.

    Raises:
        UserError: The operation, the algorithm or their pair is unknown, or a size does not fit.
    """
    found = _check_pair(op, algorithm)
    _check_sizes(found, algorithm, ranks, root, segments)
    nodes = _settle_groups(algorithm, ranks, ranks_per_node, groups)
    ring_order = _settle_order(algorithm, ranks, order)
    rooted = found in ROOTED
    if rooted:
        at = ring_order.index(root)
        ring_order = ring_order[at:] + ring_order[:at]
    settled_root = root if rooted else None
    if ranks == 1:
        return CollectiveSchedule(found, algorithm, 1, settled_root, 1, 1, ((),), nodes)
    made = PAIRS[found][algorithm](Request(ring_order, settled_root, segments, nodes))
    rows = made.rounds.rows(ranks)
    return CollectiveSchedule(found, algorithm, ranks, settled_root, made.blocks, made.parts, rows, nodes)


def list_algorithms(op: str) -> tuple[str, ...]:
    """The algorithms of an operation.

    Raises:
        UserError: The operation is unknown.
    """
    return tuple(name for name in ALGORITHMS if name in PAIRS[_check_op(op)])


def _either(names: Sequence[str]) -> str:
    return f"Use {', '.join(names[:-1])} or {names[-1]}"


def _check_op(op: str) -> Op:
    if op not in list(Op):
        raise UserError(
            Problem(
                "collective-op",
                "is not a collective operation",
                "op",
                op,
                _either(list(Op)),
                is_argument=True,
            )
        )
    return Op(op)


def _check_pair(op: str, algorithm: str) -> Op:
    known = _check_op(op)
    if algorithm not in ALGORITHMS:
        rule = "is not a collective algorithm"
        raise UserError(
            Problem(
                "collective-algorithm",
                rule,
                "algorithm",
                algorithm,
                _either(list_algorithms(op)),
                is_argument=True,
            )
        )
    if algorithm not in PAIRS[known]:
        rule = f"does not have the operation {op}"
        raise UserError(
            Problem(
                "collective-pair",
                rule,
                "algorithm",
                algorithm,
                _either(list_algorithms(op)),
                is_argument=True,
            )
        )
    return known


def _check_sizes(op: Op, algorithm: str, ranks: int, root: int, segments: int) -> None:
    most = MAX_RANKS_ALL_TO_ALL if op is Op.ALL_TO_ALL else MAX_RANKS
    if not 1 <= ranks <= most:
        rule = "is too few: a collective has at least one rank" if ranks < 1 else f"is more than {most}"
        raise UserError(
            Problem("collective-ranks", rule, "ranks", ranks, f"Use 1 to {most}", is_argument=True)
        )
    if not 0 <= root < ranks:
        fix = f"Use 0 to {ranks - 1}" if ranks > 1 else "Use 0"
        raise UserError(
            Problem("collective-root", f"is not one of ranks={ranks}", "root", root, fix, is_argument=True)
        )
    if root and op not in ROOTED:
        raise UserError(
            Problem(
                "collective-root",
                f"does not fit {op}, which has no root",
                "root",
                root,
                "Leave it out",
                is_argument=True,
            )
        )
    if not 1 <= segments <= MAX_RANKS:
        rule = "is not a number of segments"
        raise UserError(
            Problem(
                "collective-segments", rule, "segments", segments, f"Use 1 to {MAX_RANKS}", is_argument=True
            )
        )
    if segments > 1 and (op, algorithm) not in SEGMENTED:
        rule = f"does not fit {op} by {algorithm}, which does not pipeline along a chain or tree"
        raise UserError(
            Problem("collective-segments", rule, "segments", segments, "Leave it out", is_argument=True)
        )


def _settle_groups(
    algorithm: str, ranks: int, ranks_per_node: int | None, groups: Sequence[Sequence[int]] | None
) -> Groups:
    """The ranks of each node, or row of the grid."""
    if algorithm not in GROUPED:
        given = [("ranks_per_node", ranks_per_node), ("groups", groups)]
        for key, value in given:
            if value is not None:
                rule = f"has no effect on {algorithm}; only {' and '.join(GROUPED)} have groups of ranks"
                raise UserError(
                    Problem("collective-groups", rule, key, value, "Leave it out", is_argument=True)
                )
        return ()
    if groups is not None:
        if sorted(rank for group in groups for rank in group) != list(range(ranks)) or not all(groups):
            rule = f"does not have each of ranks={ranks} in one group"
            raise UserError(
                Problem("collective-groups", rule, "groups", groups, "List every rank once", is_argument=True)
            )
        return tuple(tuple(group) for group in groups)
    if ranks_per_node is None:
        if algorithm == "hierarchical":
            rule = "is missing: hierarchical needs the ranks of each node"
            raise UserError(
                Problem(
                    "collective-groups", rule, "ranks_per_node", None, f"Use 1 to {ranks}", is_argument=True
                )
            )
        return grid_rows(ranks)
    if not 1 <= ranks_per_node <= ranks:
        rule = f"does not fit ranks={ranks}"
        raise UserError(
            Problem(
                "collective-groups",
                rule,
                "ranks_per_node",
                ranks_per_node,
                f"Use 1 to {ranks}",
                is_argument=True,
            )
        )
    return split_groups(ranks, ranks_per_node)


def _settle_order(algorithm: str, ranks: int, order: Sequence[int] | None) -> tuple[int, ...]:
    if order is None:
        return tuple(range(ranks))
    if algorithm in GROUPED:
        rule = f"has no effect on {algorithm}, whose rings follow the groups"
        raise UserError(
            Problem("collective-order", rule, "order", order, "Give groups instead", is_argument=True)
        )
    if sorted(order) != list(range(ranks)):
        rule = f"is not an order of ranks={ranks}"
        raise UserError(
            Problem(
                "collective-order",
                rule,
                "order",
                order,
                f"List each of 0 to {ranks - 1} once",
                is_argument=True,
            )
        )
    return tuple(order)
