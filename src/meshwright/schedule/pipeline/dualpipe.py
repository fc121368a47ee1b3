"""DualPipe-V, DeepSeek's V-shaped schedule.

It is the V-shaped half of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437; github.com/deepseek-ai/DualPipe, and
torch's ``ScheduleDualPipeV``). The published order overlaps pairs of a forward and a backward pass. Here a
pair is F, then B: on one compute stream a dense model gains nothing from overlapping them, and an order of
single actions can be verified. A full backward pass is B directly followed by its W.
"""

from __future__ import annotations

from meshwright.schedule.pipeline.actions import Action, Rows
from meshwright.schedule.pipeline.v_shape import VShapedRow


def order_dualpipe_v(pp: int, micro_batches: int) -> Rows:
    """Two stages per rank, in a V.

    For at least 2 pp micro-batches. The eight phases of rank r, with its lower stage (0), its upper stage (1)
    and G for a full backward pass:

    1. F0, 2 (pp - r - 1) times;
    2. F0 F1, r + 1 times;
    3. B1 W F1, pp - r - 1 times;
    4. F0 G1 F1 G0, once for each remaining micro-batch: the steady state;
    5. G1 F1 G0, pp - r - 1 times;
    6. backward passes of both stages, alternating, r + 1 each: the first half full, the others without W;
    7. W B0, pp - r - 1 times;
    8. the remaining W.
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
