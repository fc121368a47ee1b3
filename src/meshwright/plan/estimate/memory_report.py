"""The memory of one layout as a ledger to print: every line of every class of ranks with its formula."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import LINES, StageLedger, ledger_stages
from meshwright.plan.estimate.moments import MOMENT_LINES
from meshwright.plan.estimate.state import STATE_LINES
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.moments import Line
from meshwright.spec.layout import Layout


@dataclass(frozen=True)
class ClassLedger:
    """One class of pipeline ranks."""

    name: str
    """`first`, `middle` or `last`."""
    fullest_at: str
    """The moment of the step at which its ranks hold most."""
    lines: tuple[Line, ...]
    """What they hold then."""
    peaks: dict[str, int]
    """Bytes at named times: `between steps`, `in step`, `first step`, `checkpoint`."""

    @property
    def peak_bytes(self) -> int:
        """The largest of them within a step."""
        return self.peaks["in step"]


def explain_memory(workload: Workload, layout: Layout) -> list[ClassLedger]:
    """The classes of a layout's pipeline ranks, by the functions that estimate a grid.

    A formula is a sum of products with what each is in brackets; it works out to the line's bytes.
    """
    grid = Grid.of([layout])
    return [_explain_class(workload, grid, ledger) for ledger in ledger_stages(workload, grid)]


def _explain_class(workload: Workload, grid: Grid, ledger: StageLedger) -> ClassLedger:
    rules, moment = workload.profile.memory, ledger.moments[int(ledger.fullest[0])]
    made = float(np.asarray(moment.gradients).reshape(-1)[0])
    formulas = {name: ledger.state[name].formula(0) for name in STATE_LINES}
    if made != 1.0:
        formulas["gradients"] = ledger.state["gradients"].times(made).formula(0)
    formulas |= {name: getattr(moment, name).formula(0) for name in MOMENT_LINES}
    allocated = sum(float(ledger.lines[name][0]) for name in LINES if name not in ("allocator", "context"))
    formulas["buffers"] = ledger.buffers.formula(0)
    formulas["allocator"] = f"{allocated!r} x {rules.reserve} [of what is allocated]"
    formulas["context"] = f"{rules.context_bytes!r} [CUDA and NCCL]"
    if workload.cluster.device != "cuda":
        formulas |= {"allocator": "0", "context": "0"}
    lines = tuple(
        Line(name, round(float(ledger.lines[name][0])), formulas[name])
        for name in LINES
        if float(ledger.lines[name][0]) != 0.0
    )
    return ClassLedger(ledger.stage.name, moment.name, lines, _name_peaks(workload, grid, ledger))


def _name_peaks(workload: Workload, grid: Grid, ledger: StageLedger) -> dict[str, int]:
    """Bytes on the device at the times that users ask about.

    Between steps and at a checkpoint, which is copied to the host piece by piece, there is only state. In the
    first step optimizers that make their state when they first step have none yet; Meshwright's replicas that
    accumulate hold their gradients twice, until the buckets have been reduced once.
    """
    state = {name: float(ledger.lines[name][0]) for name in STATE_LINES}
    context, peak = float(ledger.lines["context"][0]), float(ledger.peak[0])
    between = float(ledger.between[0])
    first = peak - state["optimizer"]
    if workload.profile.name == "meshwright":
        several = int(grid.micro_batches(workload.global_batch)[0]) > 1
        twice = several and int(grid.dp_replicate[0]) > 1
        first = peak + (float(np.asarray(ledger.state["gradients"].bytes).reshape(-1)[0]) if twice else 0.0)
    named = {
        "between steps": between + context,
        "in step": peak,
        "first step": first,
        "checkpoint": between + context,
    }
    return {name: round(value) for name, value in named.items()}
