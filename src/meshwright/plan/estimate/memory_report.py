"""The estimated memory of one layout as a ledger: every line of every class of ranks with its formula."""

from __future__ import annotations

import numpy as np

from meshwright.plan.contract import Line
from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.memory import StageLedger, build_stage_ledgers
from meshwright.plan.estimate.memory_snapshots import SNAPSHOT_LINES
from meshwright.plan.estimate.state import STATE_LINES
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.memory.ledger import Ledger
from meshwright.spec.layout import Layout


def estimate_ledgers(workload: Workload, layout: Layout) -> list[Ledger]:
    """A ledger for each class of a layout's pp ranks (first, middle, last).

    The same functions estimate a grid. A formula is a sum of products, each with its label in brackets; it
    evaluates to the bytes of its line.
    """
    grid = Grid.of([layout])
    classes = [ledger for ledger in build_stage_ledgers(workload, grid) if ledger.stage.exists[0]]
    return [_write_class(workload, grid, ledger) for ledger in classes]


def _write_class(workload: Workload, grid: Grid, ledger: StageLedger) -> Ledger:
    snapshot = ledger.snapshots[int(ledger.peak_index[0])]
    made = float(np.asarray(snapshot.gradients).reshape(-1)[0])
    formulas = {name: ledger.state[name].formula(0) for name in STATE_LINES}
    if made != 1.0:
        formulas["gradients"] = ledger.state["gradients"].times(made).formula(0)
    formulas |= {name: getattr(snapshot, name).formula(0) for name in SNAPSHOT_LINES}
    formulas["buffers"] = ledger.buffers.formula(0)
    lines = tuple(
        Line(name, round(float(ledger.lines[name][0])), formulas[name])
        for name in (*STATE_LINES, *SNAPSHOT_LINES, "buffers")
        if float(ledger.lines[name][0]) != 0.0
    )
    state = {name: round(float(_first(ledger.state[name].bytes))) for name in STATE_LINES}
    peak, kept = sum(line.bytes for line in lines), round(float(ledger.lines["activations"][0]))
    return Ledger(
        lines=lines,
        state_bytes={name: size for name, size in state.items() if size},
        peak_bytes=peak,
        peak_at=snapshot.name,
        first_peak_bytes=_first_step_bytes(workload, grid, ledger, peak),
        activation_bytes=kept,
        touched_bytes=kept,
    )


def _first_step_bytes(workload: Workload, grid: Grid, ledger: StageLedger, peak: int) -> int:
    """The peak of the first step.

    Optimizers that create their state in their first step have none yet. Meshwright's DDP ranks that
    accumulate hold their gradients twice until the first reduction of the buckets.
    """
    if workload.profile.name != "meshwright":
        return peak - round(float(ledger.lines["optimizer"][0]))
    several = int(grid.micro_batches(workload.global_batch)[0]) > 1
    twice = several and int(grid.dp_replicate[0]) > 1
    return peak + (round(float(_first(ledger.state["gradients"].bytes))) if twice else 0)


def _first(value: Floats | float) -> float:
    return float(np.asarray(value).reshape(-1)[0])
