"""Zero-bubble schedules: ZB-H1 and ZBV.

They follow Qi et al., "Zero Bubble Pipeline Parallelism" (2023): the backward pass is split. Another rank
waits only for the input gradient (B); the weight gradients (W) can fill bubbles. The orders are our own.
"""

from __future__ import annotations

from meshwright.schedule.pipeline.actions import Action, Kind, Rows
from meshwright.schedule.pipeline.v_shape import VShapedRow


def order_zb_h1(pp: int, micro_batches: int) -> Rows:
    """1F1B in which rank r defers its last r weight gradients to the end, where it would be idle.

    Rank r has pp - r in-flight micro-batches before their backward pass, as in 1F1B, and r more before W: pp
    on every rank, as on rank 0 of 1F1B.
    """
    rows = []
    for rank in range(pp):
        ahead = min(pp - 1 - rank, micro_batches)
        row = [Action(Kind.FORWARD, rank, m) for m in range(ahead)]
        for m in range(micro_batches):
            if m + ahead < micro_batches:
                row.append(Action(Kind.FORWARD, rank, m + ahead))
            row.append(Action(Kind.BACKWARD, rank, m))
            if m >= rank:
                row.append(Action(Kind.WEIGHT, rank, m - rank))
        row += [Action(Kind.WEIGHT, rank, m) for m in range(max(0, micro_batches - rank), micro_batches)]
        rows.append(tuple(row))
    return tuple(rows)


def order_zbv(pp: int, micro_batches: int) -> Rows:
    """Two stages per rank, in a V: rank 0 has the first and the last stage.

    Rank r, with its lower stage (0) and its upper stage (1):

    - fill: 2 (pp - r) - 1 times F0, until the first micro-batch has reached the last rank and returned; then
      F1 and F0 alternating, r times, while it reaches rank 0 and its gradient returns; then F1 B1 W1, pp - r
      times, until that gradient has reached the last rank and returned;
    - steady state: F0 B0 W0 F1 B1 W1 per micro-batch, without idle time;
    - drain: first backward passes that other ranks wait for, r pairs without W, then each with one W, and the
      remaining weight gradients.

    In flight are 2 pp activations of half-size stages: as much as on rank 0 of 1F1B.
    """
    return tuple(_zbv_row(rank, pp, micro_batches) for rank in range(pp))


def _zbv_row(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    row = VShapedRow(rank, pp, micro_batches)
    row.add("F0" for _ in range(2 * (pp - rank) - 1))
    row.add(step for _ in range(rank) for step in ("F1", "F0"))
    row.add(step for _ in range(pp - rank) for step in ("F1", "B1", "W"))
    while row.left("F0") or row.left("F1"):
        row.add(("F0", "B0", "W", "F1", "B1", "W"))
    row.add(step for _ in range(rank) for step in ("B0", "B1"))
    while row.left("B0") or row.left("B1"):
        row.add(("B0", "W"))
        row.add(("B1", "W") if row.left("B1") else ())
    while row.deferred:
        row.add(("W",))
    return tuple(row.actions)
