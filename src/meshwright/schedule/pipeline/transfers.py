"""The sends between ranks that follow from a schedule, and how long a sender keeps its buffers."""

from __future__ import annotations

import bisect

from meshwright.schedule.pipeline.actions import Action, PipelineSchedule, consumer_of, producer_of


def receiver_of(action: Action, schedule: PipelineSchedule) -> int | None:
    """The other rank that needs an action's result, or None."""
    used = consumer_of(action, schedule.stages)
    if used is None:
        return None
    home = schedule.rank_of(used.stage)
    return home if home != schedule.rank_of(action.stage) else None


def list_needed(schedule: PipelineSchedule, rank: int) -> list[Action]:
    """The results that a rank receives, in the order of its actions."""
    producers = (producer_of(action, schedule.stages) for action in schedule.ranks[rank])
    return [source for source in producers if source and receiver_of(source, schedule) == rank]


def find_releases(schedule: PipelineSchedule, rank: int) -> dict[Action, list[Action]]:
    """For each receive of a rank, its own sends that have completed by then.

    The peer consumed such a send before it computed the result that now arrives.
    """
    positions = schedule.positions
    arrivals: dict[int, list[tuple[int, Action]]] = {}
    for source in list_needed(schedule, rank):
        at = positions[_user(source, schedule)][1]
        arrivals.setdefault(schedule.rank_of(source.stage), []).append((at, source))
    releases: dict[Action, list[Action]] = {}
    for at, action in enumerate(schedule.ranks[rank]):
        peer = receiver_of(action, schedule)
        if peer is None:
            continue
        used, later = positions[_user(action, schedule)][1], arrivals.get(peer, [])
        for _, source in later[bisect.bisect_right(later, at, key=lambda arrival: arrival[0]) :]:
            if positions[source][1] >= used:
                releases.setdefault(source, []).append(action)
                break
    return releases


def _user(action: Action, schedule: PipelineSchedule) -> Action:
    """The action that consumes a result that is sent."""
    used = consumer_of(action, schedule.stages)
    assert used is not None, "a sent result has a consumer"
    return used
