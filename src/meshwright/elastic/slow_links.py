"""Finds the node with a slow network link; waits do not show it: all ranks of a collective wait equally long.

Each rank reports how long its connections to other nodes were busy (``measure.link_time``). The links between
all other nodes give the expected time of a link: its bytes at their slowest rate. A link is late by the time
above that. The node with the latest link is named; if that link is late for both of its ends, the node that
sends (``TIE_S``). With fewer than three nodes there are no other links to compare with. If two nodes are
slow, neither is named: each is compared with the slow link of the other. Pure: no clock, no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LinkTimes = Mapping[str, Sequence[float]]
"""By ``LOCAL>PEER``, two addresses: seconds and bytes."""
FEWEST_NODES = 3
COMPARED = 0.25
"""A link is compared with links that sent this share of its bytes: small messages have another rate."""

LEAST_USUAL_S = 1e-3
"""No link is expected to take less: shorter times are noise."""
TIE_S = 1e-9
"""Times that differ by less are equal: the node that sends counts as the later one."""


@dataclass(frozen=True)
class LateLink:
    """The slowest link of a step."""

    rank: int
    """The first rank of the node."""
    late_s: float
    """Above the time of its bytes at the rate of the other links."""
    slowdown: float
    """Its time as a multiple of that."""


@dataclass
class _Link:
    seconds: float = 0.0
    sent: float = 0.0


def find_late_link(reports: Mapping[int, LinkTimes], waited_s: float) -> LateLink | None:
    """The slowest link of a step; None if no node is slower than the others.

    Args:
        reports: Reports of all ranks.
        waited_s: How long a typical rank waited for others: a link whose time is overlapped delays no rank.
    """
    ranks, links = _merge(reports)
    if len(ranks) < FEWEST_NODES:
        return None
    latest: LateLink | None = None
    for node in sorted(ranks, key=lambda one: ranks[one]):
        found = _find_late_link_of(node, ranks[node], links)
        if found is not None and (latest is None or found.late_s > latest.late_s):
            latest = found
    if latest is None:
        return None
    return LateLink(latest.rank, min(latest.late_s, waited_s), latest.slowdown)


def _merge(reports: Mapping[int, LinkTimes]) -> tuple[dict[str, int], dict[tuple[str, str], _Link]]:
    """The first rank of each node, and the links between nodes."""
    ranks: dict[str, int] = {}
    for rank in sorted(reports):
        for name in reports[rank]:
            ranks.setdefault(name.partition(">")[0], rank)
    links: dict[tuple[str, str], _Link] = {}
    for report in reports.values():
        for name, (seconds, sent) in report.items():
            local, _, peer = name.partition(">")
            if peer in ranks:  # else an object store, for example
                link = links.setdefault((local, peer), _Link())
                link.seconds, link.sent = max(link.seconds, seconds), link.sent + sent
    return ranks, links


def _find_late_link_of(node: str, rank: int, links: Mapping[tuple[str, str], _Link]) -> LateLink | None:
    """The latest link of a node, beside all links of others."""
    others = [link for ends, link in links.items() if node not in ends]
    found: LateLink | None = None
    for (source, _), link in ((ends, one) for ends, one in links.items() if node in ends):
        rates = [o.seconds / o.sent for o in others if o.sent >= COMPARED * link.sent and o.sent > 0]
        if not rates:
            continue
        usual_s = max(LEAST_USUAL_S, link.sent * max(rates))
        late_s = link.seconds - usual_s - (0.0 if source == node else TIE_S)
        if late_s > 0 and (found is None or late_s > found.late_s):
            found = LateLink(rank, late_s, link.seconds / usual_s)
    return found
