"""The audit: what the plan promised beside what the run did.

State and collectives must be **equal**, on every rank; activations and peak may differ by 5%. Where blocks
are compiled these two are shown and not judged, unless our own kernels compute them: then 3% of the peak are
allowed. Of a model with experts these two are predicted for the rows that a rank's experts read
(``routed_load``): the plan has the even share. Step time is shown and not judged. What was not measured is a
failure too: a contract that nobody checked did not hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.audit.expert_load import describe_load, find_effect
from meshwright.audit.record import RunRecord
from meshwright.core.units import format_bytes
from meshwright.layout.stages import pp_rank_of
from meshwright.plan.contract import CollectiveTraffic, Plan
from meshwright.plan.memory.compiled import has_exact_peak

PEAK_TOLERANCE = 0.05
"""For what depends on torch's kernels: activations and the peak."""
COUNTED_PEAK_TOLERANCE = 0.03
"""For the peak of our own kernels' blocks: what the allocator rounds up, and attention's own workspace."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(CollectiveTraffic):
    """One kind of collective over the whole run, on the rank that differs most from the promise.

    Where the ranks at the places of a pipeline are promised different ones, a row for each place.
    """

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
    compiled: bool = False
    """What compiled code keeps is the compiler's choice: shown, not judged."""
    expert_load_bytes: int = 0
    """What of the prediction is not the plan's: experts read more rows than an even share, or fewer."""

    @property
    def ok(self) -> bool:
        """Whether the promise held."""
        if self.compiled:
            return True
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
    load: tuple[str, ...] = ()
    """Sentences about ranks whose experts did not read an even share of the rows."""

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.differences

    @property
    def measured(self) -> bool:
        """Whether the audited step was reached on any rank."""
        return any(row.measured is not None for row in self.state)

    def as_dict(self) -> dict[str, Any]:
        """The audit for ``--json``."""
        return {
            "audit_ok": self.ok,
            "differences": list(self.differences),
            "load": list(self.load),
            "state": [{**asdict(row), "ok": row.ok} for row in self.state],
            "collectives": [row.as_dict() for row in self.collectives],
        }


def audit_run(plan: Plan, record: RunRecord) -> Audit:
    """Hold a run against its plan."""
    state = _state_rows(plan, record)
    collectives = _collective_rows(plan, record)
    cut_short = _describe_incomplete(plan, record)
    known = [row for row in state if row.measured is not None] if cut_short else state
    differences = [_state_difference(row) for row in known if not row.ok]
    differences += [_collective_difference(row) for row in collectives if not row.equal]
    unreported = [rank for rank in range(plan.world_size) if rank not in record.collectives]
    if cut_short:
        differences.append(cut_short)
    elif unreported:
        ranks = ", ".join(str(r) for r in unreported)
        differences.append(f"the collectives of rank {ranks} were not reported: the run did not end there")
    load = describe_load(plan, record)
    return Audit(tuple(state), tuple(collectives), tuple(differences), tuple(load))


def audit_rank(plan: Plan, rank: int, record: RunRecord) -> Audit:
    """Hold one rank, of which alone there is a record, against the plan; what it never did is left out."""
    state = _state_rows(dataclasses.replace(plan, ranks=(plan.ranks[rank],)), record)
    collectives = [row for row in _collective_rows(plan, record) if row.calls or row.predicted_calls]
    differences = [_state_difference(row) for row in state if not row.ok]
    differences += [_collective_difference(row) for row in collectives if not row.equal]
    return Audit(tuple(state), tuple(collectives), tuple(differences))


def describe_match(plan: Plan) -> str:
    """What was equal, for a plan that held."""
    totals = [sum(rank.state_bytes.values()) for rank in plan.classes().values()]
    total = f"{format_bytes(min(totals))} to " * (min(totals) < max(totals)) + format_bytes(max(totals))
    if not plan.collectives:
        return f"{total} of state a rank is equal; there are no collectives."
    return f"{total} of state a rank and every collective are equal."


def _describe_incomplete(plan: Plan, record: RunRecord) -> str:
    """One sentence about all that a run did not come to measure; nothing for a run that came so far."""
    everywhere = set(range(plan.world_size))
    missing = [
        name
        for name, found in (("memory", record.state), ("collectives", record.collectives))
        if not everywhere <= set(found)
    ]
    if record.status == "unfinished":
        without = f": not measured on every rank: {' and '.join(missing)}" if missing else ""
        return f"the run did not come to its end{without}"
    if record.status == "interrupted" and not record.state:
        what = "memory was not measured" if record.collectives else "nothing was measured"
        return f"stopped before the audited step: {what}"
    return ""


def _state_rows(plan: Plan, record: RunRecord) -> list[StateRow]:
    rows: list[StateRow] = []
    for promised in plan.ranks:
        found = record.state.get(promised.rank)
        for kind, predicted in promised.state_bytes.items():
            measured = found.state_bytes.get(kind) if found else None
            rows.append(StateRow(promised.rank, kind, predicted, measured))
        for kind in promised.state_bytes:
            expected = promised.offloaded_bytes.get(kind, 0)
            measured = found.offloaded_bytes.get(kind, 0) if found else None
            if expected or measured:
                rows.append(StateRow(promised.rank, f"{kind} on the host", expected, measured))
        peak = promised.first_peak_bytes if found and found.first_step else promised.peak_bytes
        counted, effect = has_exact_peak(plan.job), find_effect(plan, promised, found)
        compiled = found is not None and found.compiled and not counted
        for kind, predicted, measured, more, allowed in (
            (
                "activations",
                promised.activation_bytes,
                found.activation_bytes if found else None,
                effect.activations,
                PEAK_TOLERANCE,
            ),
            (
                "peak",
                peak,
                found.peak_bytes if found else None,
                effect.peak,
                COUNTED_PEAK_TOLERANCE if counted else PEAK_TOLERANCE,
            ),
        ):
            rows.append(StateRow(promised.rank, kind, predicted + more, measured, allowed, compiled, more))
    return rows


Kind = tuple[str, str, str, int]
"""Axis, operation, phase and number of ranks in the group."""


def _collective_rows(plan: Plan, record: RunRecord) -> list[CollectiveRow]:
    """For each kind of collective, and each promise of it, the rank that is furthest from the promise."""
    rows: dict[tuple[Kind, int | None], CollectiveRow] = {}
    alone = {(row.axis, row.op, row.phase, row.ranks) for row in plan.collectives if row.pp_rank is not None}
    for rank, reported in record.collectives.items():
        times = {"setup": 1, "step": reported.steps, "eval": reported.evaluations, "save": reported.saves}
        promised, found = _add_up(plan.collectives_of(rank)), _add_up(reported.rows)
        for kind in promised.keys() | found.keys():
            calls, sent = found.get(kind, (0, 0))
            promised_calls, promised_bytes = promised.get(kind, (0, 0))
            occurrences, pp_rank = (
                times.get(kind[2], 0),
                pp_rank_of(plan.job, rank) if kind in alone else None,
            )
            row = CollectiveRow(
                *kind,
                calls,
                sent,
                pp_rank,
                predicted_calls=promised_calls * occurrences,
                predicted_bytes=promised_bytes * occurrences,
            )
            known = rows.get((kind, pp_rank))
            if known is None or (known.equal and not row.equal):
                rows[kind, pp_rank] = row
    order = {"setup": 0, "step": 1, "eval": 2, "save": 3}
    return [rows[key] for key in sorted(rows, key=lambda k: (order.get(k[0][2], 4), *k[0], k[1] or 0))]


def _add_up(rows: Iterable[CollectiveTraffic]) -> dict[Kind, tuple[int, int]]:
    """Calls and bytes by kind; rows of the same kind are added."""
    sums: dict[Kind, tuple[int, int]] = {}
    for row in rows:
        kind = (row.axis, row.op, row.phase, row.ranks)
        calls, sent = sums.get(kind, (0, 0))
        sums[kind] = (calls + row.calls, sent + row.bytes)
    return sums


def _state_difference(row: StateRow) -> str:
    if row.measured is None:
        return f"rank {row.rank}: {row.kind} was not measured; predicted {format_bytes(row.predicted)}"
    share = (row.measured - row.predicted) / row.predicted if row.predicted else float("inf")
    return f"rank {row.rank}: {row.kind} is {row.measured} bytes, predicted {row.predicted} ({share:+.1%}" + (
        f", {row.tolerance:.0%} allowed)" if row.tolerance else ", equal is required)"
    )


def _collective_difference(row: CollectiveRow) -> str:
    extra = "" if row.predicted_calls else "; the plan has no such call"
    whose = "" if row.pp_rank is None else f"pp rank {row.pp_rank}, "
    return (
        f"{whose}axis {row.axis}, {row.op} in phase {row.phase}: {row.calls} calls and {row.bytes} bytes, "
        f"predicted {row.predicted_calls} and {row.predicted_bytes}{extra}"
    )
