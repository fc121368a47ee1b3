"""The audit: what the plan promised beside what the run did.

State and collectives must be **equal**, on every rank; the peak may differ by 5%. Step time is shown and
not judged. What was not measured is a failure too: a contract that nobody checked did not hold.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.core.units import format_bytes
from meshwright.explain.record import RunRecord
from meshwright.plan.contract import Plan

PEAK_TOLERANCE = 0.05


@dataclass(frozen=True)
class CollectiveRow:
    """One kind of collective over the whole run, on the rank that differs most from the promise."""

    axis: str
    op: str
    phase: str
    ranks: int
    calls: int
    bytes: int
    predicted_calls: int
    predicted_bytes: int

    @property
    def equal(self) -> bool:
        """Whether the promise held."""
        return (self.calls, self.bytes) == (self.predicted_calls, self.predicted_bytes)


@dataclass(frozen=True)
class StateRow:
    """One kind of state on one rank, in bytes; ``None`` where nothing was measured."""

    rank: int
    kind: str
    predicted: int
    measured: int | None
    tolerance: float = 0.0

    @property
    def held(self) -> bool:
        """Whether the promise held."""
        if self.measured is None:
            return False
        return abs(self.measured - self.predicted) <= self.tolerance * self.predicted


@dataclass(frozen=True)
class Audit:
    """The verdict, with everything it rests on."""

    state: tuple[StateRow, ...]
    collectives: tuple[CollectiveRow, ...]
    differences: tuple[str, ...]
    """A sentence for each promise that did not hold."""

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The audit for ``--json``."""
        return {
            "audit_ok": self.ok,
            "differences": list(self.differences),
            "state": [{**asdict(row), "ok": row.held} for row in self.state],
            "collectives": [asdict(row) for row in self.collectives],
        }


def audit_run(plan: Plan, record: RunRecord) -> Audit:
    """Hold a run against its plan."""
    state = _state_rows(plan, record)
    collectives = _collective_rows(plan, record)
    differences = [_state_difference(row) for row in state if not row.held]
    differences += [_collective_difference(row) for row in collectives if not row.equal]
    unheard = [rank for rank in range(plan.world_size) if rank not in record.collectives]
    if unheard:
        ranks = ", ".join(str(r) for r in unheard)
        differences.append(f"the collectives of rank {ranks} were not reported: the run did not end there")
    return Audit(tuple(state), tuple(collectives), tuple(differences))


def _state_rows(plan: Plan, record: RunRecord) -> list[StateRow]:
    rows: list[StateRow] = []
    for promised in plan.ranks:
        measured = record.state.get(promised.rank)
        for kind, predicted in promised.state_bytes.items():
            found = measured["state_bytes"].get(kind) if measured else None
            rows.append(StateRow(promised.rank, kind, predicted, found))
        first = bool(measured and measured.get("first_step"))
        peak = promised.first_peak_bytes if first else promised.peak_bytes
        found = measured["peak_bytes"] if measured else None
        rows.append(StateRow(promised.rank, "peak", peak, found, PEAK_TOLERANCE))
    return rows


def _collective_rows(plan: Plan, record: RunRecord) -> list[CollectiveRow]:
    """For each kind of collective, the rank that is furthest from the promise."""
    promised = {(t.axis, t.op, t.phase): t for t in plan.collectives}
    rows: dict[tuple[str, str, str], CollectiveRow] = {}
    for event in record.collectives.values():
        times = {"setup": 1, "step": event["steps"], "eval": event["evaluations"]}
        found = {(r["axis"], r["op"], r["phase"]): r for r in event["rows"]}
        for key in promised.keys() | found.keys():
            axis, op, phase = key
            promise, seen = promised.get(key), found.get(key)
            row = CollectiveRow(
                axis=axis,
                op=op,
                phase=phase,
                ranks=promise.ranks if promise else seen["ranks"] if seen else 0,
                calls=seen["calls"] if seen else 0,
                bytes=seen["bytes"] if seen else 0,
                predicted_calls=promise.calls * times.get(phase, 0) if promise else 0,
                predicted_bytes=promise.bytes * times.get(phase, 0) if promise else 0,
            )
            if key not in rows or (rows[key].equal and not row.equal):
                rows[key] = row
    order = {"setup": 0, "step": 1, "eval": 2}
    return [rows[key] for key in sorted(rows, key=lambda k: (order.get(k[2], 3), k[0], k[1]))]


def _state_difference(row: StateRow) -> str:
    if row.measured is None:
        return f"rank {row.rank}: {row.kind} was not measured; predicted {format_bytes(row.predicted)}"
    share = (row.measured - row.predicted) / row.predicted if row.predicted else float("inf")
    return f"rank {row.rank}: {row.kind} is {row.measured} bytes, predicted {row.predicted} ({share:+.1%}" + (
        f", {row.tolerance:.0%} allowed)" if row.tolerance else ", equal is required)"
    )


def _collective_difference(row: CollectiveRow) -> str:
    extra = "" if row.predicted_calls else "; the plan has no such call"
    return (
        f"axis {row.axis}, {row.op} in phase {row.phase}: {row.calls} calls and {row.bytes} bytes, "
        f"predicted {row.predicted_calls} and {row.predicted_bytes}{extra}"
    )
