"""Recursive doubling, recursive halving-doubling, binomial trees, and Bruck's all-to-all.

With 2^m + r members, r of them are folded in: before the exchange they give their data to a partner, after it
they get the result. Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH"; Bruck et al. 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.collective.naive import Pair
from meshwright.schedule.collective.rounds import Chunks, Rounds, collect_rounds, copy_message
from meshwright.schedule.collective.steps import Combine


def largest_power_of_two(ranks: int) -> int:
    """The largest power of two that is not above."""
    return 1 << (ranks.bit_length() - 1)


def binomial_broadcast(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """In round k, each of the 2^k members that have the tensor sends it to another."""
    whole = [chunk for segment in segments for chunk in segment]
    ranks = len(group)
    return collect_rounds(
        copy_message(k, group[i], group[i + (1 << k)], whole)
        for k in range((ranks - 1).bit_length())
        for i in range(min(1 << k, ranks - (1 << k)))
    )


def binomial_scatter(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Recursive halving: a member with the shards of a range sends those of the upper half to its first."""
    messages = []
    ranges = [(0, len(group), 0)]
    while ranges:
        low, high, at = ranges.pop()
        if high - low < 2:
            continue
        middle = low + (high - low + 1) // 2
        upper = [chunk for shard in shards[middle:high] for chunk in shard]
        messages.append(copy_message(at, group[low], group[middle], upper))
        ranges += [(low, middle, at + 1), (middle, high, at + 1)]
    return collect_rounds(messages)


def doubling_all_gather(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """In round k, members at the distance 2^k exchange all that they have."""
    mains, extras = _fold(group)
    held: list[list[int]] = []
    for index in range(len(mains)):
        mine = (2 * index, 2 * index + 1) if index < len(extras) else (index + len(extras),)
        held.append([chunk for i in mine for chunk in shards[i]])
    whole = [chunk for shard in shards for chunk in shard]
    own = [set(shards[2 * i + 1]) for i in range(len(extras))]
    fold = collect_rounds(copy_message(0, extra, mains[i], own[i]) for i, extra in enumerate(extras))
    unfold = collect_rounds(
        copy_message(0, mains[i], extra, (c for c in whole if c not in own[i]))
        for i, extra in enumerate(extras)
    )
    messages = []
    for k in range(len(mains).bit_length() - 1):
        pairs = [(i, i ^ (1 << k)) for i in range(len(mains))]
        messages += [copy_message(k, mains[i], mains[j], held[i]) for i, j in pairs]
        held = [held[i] + held[j] for i, j in pairs]
    return fold.then(collect_rounds(messages)).then(unfold)


def doubling_all_reduce(group: Sequence[int], segments: Sequence[Chunks]) -> Rounds:
    """In round k, members at the distance 2^k exchange their sums of the whole tensor."""
    whole = [chunk for segment in segments for chunk in segment]
    mains, _ = _fold(group)
    exchange = collect_rounds(
        copy_message(k, mains[i], mains[i ^ (1 << k)], whole)
        for k in range(len(mains).bit_length() - 1)
        for i in range(len(mains))
    )
    return _folded(group, whole, exchange.reverse(Combine.REDUCE))


def halving_doubling_all_reduce(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    There is one shard for each member of the largest power of two (:func:`largest_power_of_two`).
    """
    mains, _ = _fold(group)
    gather = doubling_all_gather(mains, shards)
    whole = [chunk for shard in shards for chunk in shard]
    return _folded(group, whole, gather.reverse(Combine.REDUCE).then(gather))


def halving_doubling_broadcast(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Scatter by recursive halving, then all-gather by recursive doubling."""
    return binomial_scatter(group, shards).then(doubling_all_gather(group, shards))


def halving_doubling_reduce(group: Sequence[int], shards: Sequence[Chunks]) -> Rounds:
    """Reduce-scatter by recursive halving, then gather by a binomial tree."""
    reduce_scatter = doubling_all_gather(group, shards).reverse(Combine.REDUCE)
    return reduce_scatter.then(binomial_scatter(group, shards).reverse(Combine.COPY))


def bruck_all_to_all(group: Sequence[int], pair: Pair) -> Rounds:
    """In round k, chunks whose distance has bit k set move 2^k places; a chunk may be forwarded."""
    ranks = len(group)
    messages = []
    for k in range((ranks - 1).bit_length()):
        hop = 1 << k
        for i in range(ranks):
            moved: list[int] = []
            for distance in range(ranks):
                if distance & hop:
                    source = (i - distance % hop) % ranks
                    moved += pair(group[source], group[(source + distance) % ranks])
            messages.append(copy_message(k, group[i], group[(i + hop) % ranks], moved))
    return collect_rounds(messages)


def _fold(group: Sequence[int]) -> tuple[list[int], list[int]]:
    """A power of two of members, and the others; extra i is the partner of main i."""
    extra = len(group) - largest_power_of_two(len(group))
    mains = [group[2 * i] for i in range(extra)] + list(group[2 * extra :])
    return mains, [group[2 * i + 1] for i in range(extra)]


def _folded(group: Sequence[int], whole: Chunks, exchange: Rounds) -> Rounds:
    """An all-reduce of the mains, with the extras folded in before and after."""
    mains, extras = _fold(group)
    back = collect_rounds(copy_message(0, mains[i], extra, whole) for i, extra in enumerate(extras))
    return back.reverse(Combine.REDUCE).then(exchange).then(back)
