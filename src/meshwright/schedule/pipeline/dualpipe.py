"""DualPipe-V: the order that DeepSeek published, in which forward and backward passes meet on every rank.

It is the V-shaped half of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437; github.com/deepseek-ai/DualPipe, and
torch's ``ScheduleDualPipeV``). What is published as a pair that runs at once is here F and then B: on one
stream of computation a dense model gains nothing from running them together, and an order of single actions
can be proved. A whole backward pass is B with its W directly behind.
"""

from __future__ import annotations

from meshwright.schedule.pipeline.actions import Action
from meshwright.schedule.pipeline.v_shape import VShapedRow

Rows = tuple[tuple[Action, ...], ...]


def order_dualpipe_v(pp: int, micro_batches: int) -> Rows:
    """Two stages a rank, down the ranks and up again, with as many passes of one arm as of the other.

    For 2 pp micro-batches or more; the eight phases of rank r, with its lower stage (0), its upper one (1)
    and G for a whole backward pass:

    1. F0, 2 (pp - r - 1) times;
    2. F0 F1, r + 1 times;
    3. B1 W F1, pp - r - 1 times;
    4. F0 G1 F1 G0, once for each micro-batch that is left to enter: the steady state;
    5. G1 F1 G0, pp - r - 1 times;
    6. backward passes of both in turn, r + 1 each: the first half of them whole, the others without W;
    7. W B0, pp - r - 1 times;
    8. the W that are left.
    """
    return tuple(_row(rank, pp, micro_batches) for rank in range(pp))


def _row(rank: int, pp: int, micro_batches: int) -> tuple[Action, ...]:
    row = VShapedRow(rank, pp, micro_batches)
    below = pp - rank - 1
    row.add(("F0",) * (2 * below))
    row.add(("F0", "F1") * (rank + 1))
    row.add(("B1", "W", "F1") * below)
    row.add(("F0", "G1", "F1", "G0") * row.left("F0"))
    row.add(("G1", "F1", "G0") * below)
    row.add(f"{'G' if n <= rank else 'B'}{(n + 1) % 2}" for n in range(2 * (rank + 1)))
    row.add(("W", "B0") * below)
    row.add(("W",) * (rank + 1))
    return tuple(row.actions)
