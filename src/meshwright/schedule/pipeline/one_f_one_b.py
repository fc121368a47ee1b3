"""Schedules with a full backward pass: GPipe, 1F1B and interleaved 1F1B.

GPipe (Huang et al. 2019) runs all forward passes, then all backward passes. 1F1B (PipeDream-flush; Narayanan
et al. 2021) starts backward passes as early as possible, so that a rank has at most ``pp`` in-flight
micro-batches. Interleaved 1F1B has ``virtual_stages`` stages per rank and runs groups of ``pp``
micro-batches.
"""

from __future__ import annotations

from meshwright.schedule.pipeline.actions import Action, Kind, Rows


def order_gpipe(pp: int, micro_batches: int) -> Rows:
    """All forward passes, then all backward passes, both in the order of the micro-batches."""
    return tuple(
        tuple(Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(micro_batches))
        for rank in range(pp)
    )


def order_1f1b(pp: int, micro_batches: int) -> Rows:
    """Rank r runs pp - 1 - r warm-up forward passes, then alternates one forward and one backward."""
    rows = []
    for rank in range(pp):
        forwards = [Action(Kind.FORWARD, rank, m) for m in range(micro_batches)]
        backwards = [Action(Kind.BACKWARD, rank, m) for m in range(micro_batches)]
        rows.append(_alternate(forwards, backwards, ahead=pp - 1 - rank))
    return tuple(rows)


def order_interleaved(pp: int, virtual_stages: int, micro_batches: int) -> Rows:
    """Megatron's order: groups of pp micro-batches through each of the rank's stages.

    Rank r runs 2 (pp - 1 - r) + (v - 1) pp warm-up forward passes, until the first gradient returns.
    """
    rows = []
    for rank in range(pp):
        order = _grouped(pp, virtual_stages, micro_batches)
        forwards = [Action(Kind.FORWARD, chunk * pp + rank, m) for chunk, m in order]
        last = virtual_stages - 1
        backwards = [Action(Kind.BACKWARD, (last - chunk) * pp + rank, m) for chunk, m in order]
        ahead = 2 * (pp - 1 - rank) + (virtual_stages - 1) * pp
        rows.append(_alternate(forwards, backwards, ahead))
    return tuple(rows)


def _grouped(pp: int, virtual_stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """Pairs of model chunk and micro-batch, in the order of the forward passes of a rank."""
    return [
        (chunk, m)
        for group in range(0, micro_batches, pp)
        for chunk in range(virtual_stages)
        for m in range(group, min(group + pp, micro_batches))
    ]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """``ahead`` warm-up forward passes, then one forward and one backward each, then the rest."""
    ahead = min(ahead, len(forwards))
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - ahead :])
