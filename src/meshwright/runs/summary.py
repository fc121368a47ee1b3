"""The figures of a run as plain values: the object of ``meshwright train --json``, and what trackers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.audit.compare import Audit
from meshwright.audit.record import RunRecord
from meshwright.layout.no_effect import find_unused_settings
from meshwright.plan.contract import PlanContract, layout_keys


def summarize_run(plan: PlanContract, record: RunRecord, audit: Audit, run_dir: Path) -> dict[str, Any]:
    """Status, losses, rates, memory and collectives."""
    kinds = list(plan.ranks[0].state_bytes)
    found = [record.state.get(rank) for rank in range(plan.world_size)]
    return {
        "status": record.status,
        "run_dir": str(run_dir),
        "layout": layout_keys(plan.job),
        "world_size": plan.world_size,
        "unused_settings": [setting.as_dict() for setting in find_unused_settings(plan.job)],
        "first_step": record.first_step,
        "losses": record.losses,
        "eval_loss": record.eval_loss,
        "eval_losses": record.eval_losses,
        "tokens_per_s": record.tokens_per_s,
        "flops_per_s": record.flops_per_s(plan),
        "mfu": record.mfu,
        "mfu_basis": record.peak_basis,
        "peak_memory_bytes": [measured.peak_bytes if measured else None for measured in found],
        "predicted_peak_memory_bytes": [
            row.predicted for row in audit.state if row.kind == "peak" and row.generation is None
        ],
        "state_bytes": {kind: [m.state_bytes.get(kind) if m else None for m in found] for kind in kinds},
        "predicted_state_bytes": {kind: [r.state_bytes[kind] for r in plan.ranks] for kind in kinds},
        "offloaded_bytes": {
            kind: [m.offloaded_bytes.get(kind) if m else None for m in found] for kind in kinds
        },
        "predicted_offloaded_bytes": {
            kind: [r.offloaded_bytes.get(kind, 0) for r in plan.ranks] for kind in kinds
        },
        "collectives": [row.as_dict() for row in audit.collectives],
        "recoveries": len(record.recoveries),
        "layout_changes": len(record.layout_changes),
        "stragglers": record.stragglers.as_list(),
        "goodput": None if record.goodput is None else record.goodput.as_dict(),
        "checkpoint": record.checkpoint,
        "checkpoints": record.saves.as_dict(),
        "audit_ok": audit.ok,
        "differences": list(audit.differences),
    }
