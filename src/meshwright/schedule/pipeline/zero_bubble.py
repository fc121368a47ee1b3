"""Orders that split the backward pass, so that gradients of weights fill the bubbles: ZB-H1 and ZBV.

The idea is that of Qi et al., "Zero Bubble Pipeline Parallelism" (2023): only the gradient of a stage's
input (B) is waited for by another rank; that of its weights (W) can run whenever there is time. The orders
are our own.
"""

from __future__ import annotations

from meshwright.schedule.pipeline.actions import Action, Kind
from meshwright.schedule.pipeline.v_shape import VShapedRow

Rows = tuple[tuple[Action, ...], ...]


def order_zb_h1(pp: int, micro_batches: int) -> Rows:
    """1F1B whose rank r leaves its last r weight gradients for the end, where it would wait for nothing.

    Rank r has pp - r micro-batches whose backward pass is to come, as in 1F1B, and r more that wait for W:
    pp on every rank, what rank 0 of 1F1B holds.
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
    """Two stages a rank, down the ranks and up again, so that the first rank also holds the last stage.

    Rank r, with its lower stage (0) and its upper one (1), counting from when each result can be there:

    - filling: 2 (pp - r) - 1 times F0 until the first micro-batch has been to the last rank and back; then F1
      and F0 in turn, r times, while it goes on to rank 0 and its gradient comes back; then F1 B1 W1, pp - r
      times, until that has been to the last rank and back;
    - steady: F0 B0 W0 F1 B1 W1, six actions for each micro-batch and a rank that never waits;
    - draining: the backward passes that others wait for first, r pairs of them without W, then each with one,
      and the weight gradients that are left.

    It holds 2 pp activations of stages that are half as deep: what rank 0 of 1F1B holds.
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
    while row.waiting:
        row.add(("W",))
    return tuple(row.actions)
