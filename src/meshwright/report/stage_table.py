"""The stages of a planned pipeline as table rows: ranks, layers, times, peak memory."""

from __future__ import annotations

from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.contract import PlanContract

STAGE_COLUMNS = ("stage", "on", "layers", "with", "forward", "backward", "peak memory")


def stage_cells(plan: PlanContract) -> list[tuple[str, ...]]:
    """One row per stage; times are per micro-batch. Empty without a pipeline."""
    if plan.pipeline is None:
        return []
    times, each = plan.pipeline, plan.world_size // plan.job.layout.pp
    rows: list[tuple[str, ...]] = []
    for row in plan.stages():
        first, last = row.pp_rank * each, (row.pp_rank + 1) * each - 1
        ends = [name for name, there in (("embedding", row.embedding), ("head", row.head)) if there]
        backward = times.backward_input_s[row.stage] + times.backward_weight_s[row.stage]
        rows.append(
            (
                str(row.stage),
                f"rank {first}" if each == 1 else f"ranks {first} to {last}",
                f"{row.first_layer} to {row.last_layer} ({row.last_layer - row.first_layer + 1})",
                " and ".join(ends) or "-",
                format_seconds(times.forward_s[row.stage]),
                format_seconds(backward),
                format_bytes(plan.ranks[first].peak_bytes),
            )
        )
    return rows
