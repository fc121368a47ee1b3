"""The audit: predicted against measured memory and collectives, on every rank.

State and collectives must be **equal**. Activations and peak may differ by 5%, a peak below 8 MiB by 12%.
With Triton blocks the peak may differ by 3%. With blocks that torch.compile compiles, these two may be **at
most** 5% above the prediction: the compiler decides what to keep, and keeps less than eager blocks. With
experts, they are predicted for the rows that the rank's experts really read; the plan assumes an even load.
Step time is not audited. A value that was not measured fails the audit. Every rank must have run on its
planned device.

All generations of all attempts are audited, each for the steps that it did, and an earlier attempt against
its own plan. A rank that was killed reports nothing of its generation. Replayed steps must have
equal losses, where the run is deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.audit.expert_load import describe_load, find_effect
from meshwright.audit.placement import PlacementRow, list_placement_differences, list_placement_rows
from meshwright.audit.record import (
    GenerationRecord,
    MeasuredCollectives,
    MeasuredMemory,
    MeasuredTraffic,
    RunRecord,
)
from meshwright.audit.steps import ReplayedLoss
from meshwright.core.units import format_bytes
from meshwright.layout.stages import pp_rank_of
from meshwright.plan.contract import CollectiveTraffic, PlanContract, RankPrediction
from meshwright.plan.memory.compiled import has_exact_peak
from meshwright.plan.traffic.expert import routed_row_bytes

PEAK_TOLERANCE = 0.05
"""For activations and peak, which depend on torch's kernels."""
SMALL_PEAK_BYTES = 8 * 2**20
"""Peaks below it may differ by ``SMALL_PEAK_TOLERANCE``: in a tiny model, single buffers of a collective or
of a recomputed block are a large part of the peak."""
SMALL_PEAK_TOLERANCE = 0.12
"""The largest difference in dry runs of 329 random layouts with peaks of 0.2 to 8 MB was 10.9%."""
COUNTED_PEAK_TOLERANCE = 0.03
"""For the peak with Triton blocks: allocator rounding and attention workspace."""
FP32_ROUNDING, LOW_PRECISION_ROUNDING = 1e-5, 5e-2
"""Relative difference of the loss of a step that is replayed in another layout."""
CUDA_BLOCK_SLACK = 2 * 2**20
"""Bytes that activations on a GPU may always differ by. The caching allocator counts blocks and does not
split off a remainder below 1 MiB. Matters only for tiny models."""


@dataclass(frozen=True, kw_only=True)
class CollectiveRow(CollectiveTraffic):
    """One kind of collective over the whole run, on the rank that differs most from the prediction.

    If the predictions of pp ranks differ, there is one row per pp rank.
    """

    predicted_calls: int
    predicted_bytes: int
    """Without the rows that the router dropped."""
    dropped_rows: int = 0
    """Rows that the router dropped for lack of capacity; the plan assumes none."""
    generation: int | None = None
    """The generation that differs from the plan; None: the sum of all."""

    @property
    def equal(self) -> bool:
        """Whether calls and bytes match the prediction."""
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
    """The prediction is an upper bound: the compiler decides what compiled code keeps."""
    expert_load_bytes: int = 0
    """The part of the prediction due to uneven expert load; the plan does not have it."""
    slack: int = 0
    """Bytes that are allowed whatever the tolerance is."""
    generation: int | None = None
    """An earlier generation, which differs from the plan; None: the newest."""

    @property
    def ok(self) -> bool:
        """Whether the measured bytes match within the tolerance."""
        if self.measured is None:
            return False
        more = self.measured - self.predicted
        return (more if self.compiled else abs(more)) <= max(self.tolerance * self.predicted, self.slack)

    @property
    def allowed(self) -> str:
        """The tolerance in words; that of small peaks with its limit."""
        if not self.tolerance:
            return "equal"
        limit = f" (a peak below {SMALL_PEAK_BYTES // 2**20} MiB)"
        return f"within {self.tolerance:.0%}" + (limit if self.tolerance == SMALL_PEAK_TOLERANCE else "")

    @property
    def match(self) -> str:
        """How close a row is that is ok: as ``allowed``, but a small peak may be within 5% as well."""
        if self.measured is None or self.tolerance != SMALL_PEAK_TOLERANCE:
            return self.allowed
        near = abs(self.measured - self.predicted) <= PEAK_TOLERANCE * self.predicted
        return f"within {PEAK_TOLERANCE:.0%}" if near else self.allowed


@dataclass(frozen=True)
class Audit:
    """All rows that were compared, and the differences."""

    state: tuple[StateRow, ...]
    collectives: tuple[CollectiveRow, ...]
    differences: tuple[str, ...]
    """One sentence per value that does not match; the last one is ``incomplete``, if there is one."""
    load: tuple[str, ...] = ()
    """Sentences about ranks with uneven expert load."""
    generations: int = 1
    """How many were audited."""
    coverage: tuple[str, ...] = ()
    """Sentences about what earlier generations did not report."""
    placement: tuple[PlacementRow, ...] = ()
    """Where ranks ran, in every generation."""
    incomplete: str = ""
    """What a run that did not finish, or not its audited step, did not measure; empty for others. Whatever
    was measured is compared all the same."""

    def __repr__(self) -> str:
        rows = len(self.state) + len(self.collectives)
        return f"Audit(ok={self.ok}, rows={rows}, differences={list(self.differences)})"

    @property
    def ok(self) -> bool:
        """Whether everything matches the plan."""
        return not self.differences

    @property
    def real_differences(self) -> tuple[str, ...]:
        """Values that were measured, or should have been, and do not match."""
        return tuple(text for text in self.differences if text != self.incomplete)

    @property
    def matches_so_far(self) -> bool:
        """Whether something was measured, and all of it matches."""
        return (self.measured or bool(self.collectives)) and not self.real_differences

    @property
    def measured(self) -> bool:
        """Whether any rank reached the audited step."""
        return any(row.measured is not None for row in self.state)

    def as_dict(self) -> dict[str, Any]:
        """The audit for ``--json``."""
        return {
            "audit_ok": self.ok,
            "differences": list(self.differences),
            "incomplete": self.incomplete,
            "load": list(self.load),
            "generations": self.generations,
            "coverage": list(self.coverage),
            "placement": [row.as_dict() for row in self.placement],
            "state": [{**asdict(row), "ok": row.ok} for row in self.state],
            "collectives": [row.as_dict() for row in self.collectives],
        }


def audit_run(
    plan: PlanContract, record: RunRecord, earlier: Mapping[int, PlanContract] | None = None
) -> Audit:
    """Compare a run with its plan.

    Args:
        plan: Plan of the newest attempt, or of one that was stopped before its ranks had started.
        record: Record of all attempts.
        earlier: The plans of earlier attempts, by the first generation of the attempt.
    """
    plan = (earlier or {}).get(record.newest.attempt_start, plan)
    audited = _list_generations(plan, record, earlier or {})
    state = [
        *_earlier_state_rows(audited, record),
        *_state_rows(plan, record.state, record.newest.snapshots_off),
    ]
    collectives = _collective_rows(audited)
    incomplete = _describe_incomplete(plan, record)
    judged = [row for row in state if row.measured is not None] if incomplete else state
    differences = [_state_difference(row) for row in judged if not row.ok]
    differences += [_collective_difference(row) for row in collectives if not row.equal]
    differences += _list_replay_differences(plan, record)
    placement = list_placement_rows(audited, record)
    differences += list_placement_differences(placement)
    unreported = [rank for rank in range(plan.world_size) if rank not in record.collectives]
    if incomplete:
        differences.append(incomplete)
    elif unreported:
        ranks = ", ".join(str(r) for r in unreported)
        differences.append(f"rank {ranks} did not report its collectives: it did not finish")
    load = describe_load(plan, record)
    coverage = _describe_coverage(audited, record)
    return Audit(
        tuple(state),
        tuple(collectives),
        tuple(differences),
        tuple(load),
        len(audited),
        tuple(coverage),
        tuple(placement),
        incomplete,
    )


AuditedGenerations = list[tuple[PlanContract, GenerationRecord]]


def _list_generations(
    plan: PlanContract, record: RunRecord, earlier: Mapping[int, PlanContract]
) -> AuditedGenerations:
    """The generations whose plan is known, oldest first, with their plan."""
    found: AuditedGenerations = []
    for number in sorted(record.generations):
        generation = record.generations[number]
        newest = generation.attempt == record.newest.attempt
        own = earlier.get(generation.attempt_start, plan if newest else None)
        if own is not None:
            found.append((own, generation))
    return found


def _describe_coverage(audited: AuditedGenerations, record: RunRecord) -> list[str]:
    """Generations and ranks that could not be audited."""
    numbers = {generation.generation for _, generation in audited}
    found = [
        f"generation {number} is not audited: its plan is not in the run folder"
        for number in sorted(record.generations)
        if number not in numbers
    ]
    for plan, generation in audited:
        missing = [str(rank) for rank in range(plan.world_size) if rank not in generation.collectives]
        if generation is not record.newest and missing:
            ranks = f"rank {', '.join(missing)}"
            found.append(
                f"generation {generation.generation}: {ranks} ended without a report of its collectives"
            )
    return found


def _list_replay_differences(plan: PlanContract, record: RunRecord) -> list[str]:
    """Replayed steps with another loss, where the job requires equal ones."""
    if plan.job.cluster.device != "cpu" and not plan.job.train.deterministic:
        return []
    return [
        f"replayed step {found.step} has another loss: {found.loss!r} in generation {found.generation}, "
        f"{found.before!r} before"
        for found in record.steps.differences
        if not _is_expected(plan, record, found)
    ]


def _is_expected(plan: PlanContract, record: RunRecord, found: ReplayedLoss) -> bool:
    """Whether the loss of a step may differ: the job changed, or its layout did and it is rounding."""
    between = range(found.before_generation + 1, found.generation + 1)
    if not record.changed_curves.isdisjoint(between):
        return True
    if record.changed_layouts.isdisjoint(between) or found.loss is None or found.before is None:
        return False
    fp32 = plan.job.train.precision == "fp32" and plan.job.cluster.device == "cpu"
    return math.isclose(found.loss, found.before, rel_tol=FP32_ROUNDING if fp32 else LOW_PRECISION_ROUNDING)


def audit_rank(plan: PlanContract, rank: int, record: RunRecord) -> Audit:
    """Compare the one rank of a dry run with the plan; phases that did not run are left out."""
    state = _state_rows(dataclasses.replace(plan, ranks=(plan.ranks[rank],)), record.state, set())
    collectives = [
        row for row in _collective_rows([(plan, record.newest)]) if row.calls or row.predicted_calls
    ]
    differences = [_state_difference(row) for row in state if not row.ok]
    differences += [_collective_difference(row) for row in collectives if not row.equal]
    return Audit(tuple(state), tuple(collectives), tuple(differences))


def describe_match(plan: PlanContract) -> str:
    """The sentence for a run that matches its plan: the quantities that are equal."""
    totals = [sum(rank.state_bytes.values()) for rank in plan.classes().values()]
    total = " to ".join(dict.fromkeys(format_bytes(size) for size in (min(totals), max(totals))))
    if not plan.collectives:
        return f"State ({total} per rank) matches the plan exactly; there are no collectives."
    return f"State ({total} per rank) and all collectives match the plan exactly."


def _describe_incomplete(plan: PlanContract, record: RunRecord) -> str:
    """One sentence about what an unfinished run did not measure; empty for a finished run."""
    everywhere = set(range(plan.world_size))
    missing = [
        name
        for name, found in (("memory", record.state), ("collectives", record.collectives))
        if not everywhere <= set(found)
    ]
    if record.status == "unfinished":
        without = f": not measured on every rank: {' and '.join(missing)}" if missing else ""
        return f"the run did not finish{without}"
    if record.status == "interrupted" and not record.state:
        what = "memory was not measured" if record.collectives else "nothing was measured"
        return f"stopped before the audited step: {what}"
    return ""


def _earlier_state_rows(audited: AuditedGenerations, record: RunRecord) -> list[StateRow]:
    """Memory that earlier generations measured, where it differs from their plan."""
    rows: list[StateRow] = []
    for plan, generation in audited:
        if generation is not record.newest:
            found = _state_rows(plan, generation.state, generation.snapshots_off)
            rows += [
                dataclasses.replace(row, generation=generation.generation)
                for row in found
                if row.measured is not None and not row.ok
            ]
    return rows


def _state_rows(
    plan: PlanContract, state: Mapping[int, MeasuredMemory], snapshots_off: Collection[int]
) -> list[StateRow]:
    """Predicted and measured memory of every rank.

    Args:
        plan: The prediction.
        state: What was measured, by rank.
        snapshots_off: Ranks that found too little memory for snapshots.
    """
    rows: list[StateRow] = []
    for expected in plan.ranks:
        found = state.get(expected.rank)
        for kind, predicted in expected.state_bytes.items():
            measured = found.state_bytes.get(kind) if found else None
            rows.append(StateRow(expected.rank, kind, predicted, measured))
        for kind in expected.state_bytes:
            offloaded = expected.offloaded_bytes.get(kind, 0)
            measured = found.offloaded_bytes.get(kind, 0) if found else None
            if offloaded or measured:
                rows.append(StateRow(expected.rank, f"{kind} in CPU memory", offloaded, measured))
        snapshots = _snapshot_row(plan, expected, found, expected.rank in snapshots_off)
        rows += [] if snapshots is None else [snapshots]
        peak = expected.first_peak_bytes if found and found.first_step else expected.peak_bytes
        counted, effect = has_exact_peak(plan.job), find_effect(plan, expected, found)
        compiled = found is not None and found.compiled and not counted
        slack = CUDA_BLOCK_SLACK if plan.job.cluster.device == "cuda" else 0
        for kind, predicted, measured, more, allowed, extra in (
            (
                "activations",
                expected.activation_bytes,
                found.activation_bytes if found else None,
                effect.activations,
                PEAK_TOLERANCE,
                slack,
            ),
            (
                "peak",
                peak,
                found.peak_bytes if found else None,
                effect.peak,
                COUNTED_PEAK_TOLERANCE if counted else _peak_tolerance(peak + effect.peak),
                0,
            ),
        ):
            rows.append(
                StateRow(expected.rank, kind, predicted + more, measured, allowed, compiled, more, extra)
            )
    return rows


def _snapshot_row(
    plan: PlanContract, expected: RankPrediction, found: MeasuredMemory | None, off: bool
) -> StateRow | None:
    """In-memory snapshots of a rank; None if it has none, or if no agent kept them (torchrun)."""
    if plan.host_memory is None or found is None or found.snapshot_bytes is None:
        return None
    predicted = 0 if off else expected.snapshot_bytes
    if not predicted and not found.snapshot_bytes:
        return None
    return StateRow(expected.rank, "snapshots in CPU memory", predicted, found.snapshot_bytes)


def _peak_tolerance(predicted: int) -> float:
    return SMALL_PEAK_TOLERANCE if predicted < SMALL_PEAK_BYTES else PEAK_TOLERANCE


Kind = tuple[str, str, str, int]
"""Axis, operation, phase and number of ranks in the group."""
UNPLANNED_PHASES = ("check",)
"""Phases that no plan has: a bad step that is recomputed to name its cause."""


RowKey = tuple[Kind, int | None]
"""A kind of collective, and the pp rank if their predictions differ."""


def _collective_rows(audited: AuditedGenerations) -> list[CollectiveRow]:
    """For each kind of collective the rank that differs most from the prediction, over all generations."""
    rows: dict[RowKey, CollectiveRow] = {}
    ranks = {rank for _, generation in audited for rank in generation.collectives}
    for rank in sorted(ranks):
        for key, row in _sum_generations(audited, rank).items():
            previous = rows.get(key)
            more = previous is not None and row.predicted_calls > previous.predicted_calls
            if previous is None or (previous.equal and (more or not row.equal)):
                rows[key] = row
    order = {"setup": 0, "step": 1, "eval": 2, "replica_check": 3}
    return [rows[key] for key in sorted(rows, key=lambda k: (order.get(k[0][2], 4), *k[0], k[1] or 0))]


def _sum_generations(audited: AuditedGenerations, rank: int) -> dict[RowKey, CollectiveRow]:
    """The collectives of a rank: the sum of all generations, or the first generation that differs."""
    sums: dict[RowKey, CollectiveRow] = {}
    for plan, generation in audited:
        reported = generation.collectives.get(rank)
        for key, row in () if reported is None else _compare_rank(plan, rank, reported).items():
            previous = sums.get(key)
            if previous is not None and not previous.equal:
                continue
            if not row.equal:
                sums[key] = dataclasses.replace(
                    row, generation=generation.generation if len(audited) > 1 else None
                )
            else:
                sums[key] = row if previous is None else _add_rows(previous, row)
    return sums


def _add_rows(first: CollectiveRow, second: CollectiveRow) -> CollectiveRow:
    return dataclasses.replace(
        first,
        calls=first.calls + second.calls,
        bytes=first.bytes + second.bytes,
        predicted_calls=first.predicted_calls + second.predicted_calls,
        predicted_bytes=first.predicted_bytes + second.predicted_bytes,
        dropped_rows=first.dropped_rows + second.dropped_rows,
    )


def _compare_rank(
    plan: PlanContract, rank: int, reported: MeasuredCollectives
) -> dict[RowKey, CollectiveRow]:
    """Predicted and counted collectives of a rank in one generation."""
    rows: dict[RowKey, CollectiveRow] = {}
    alone = {(row.axis, row.op, row.phase, row.ranks) for row in plan.collectives if row.pp_rank is not None}
    times = {
        "setup": 1,
        "step": reported.steps,
        "eval": reported.evaluations,
        "replica_check": reported.replica_checks,
    }
    planned = [row for row in reported.rows if row.phase not in UNPLANNED_PHASES]
    expected, found = _sum_by_kind(plan.collectives_of(rank)), _sum_by_kind(planned)
    dropped = _sum_dropped_rows(reported.rows)
    for kind in expected.keys() | found.keys():
        calls, sent = found.get(kind, (0, 0))
        expected_calls, expected_bytes = expected.get(kind, (0, 0))
        occurrences = times.get(kind[2], 0)
        pp_rank = pp_rank_of(plan.job, rank) if kind in alone else None
        rows[kind, pp_rank] = CollectiveRow(
            *kind,
            calls,
            sent,
            pp_rank,
            predicted_calls=expected_calls * occurrences,
            predicted_bytes=expected_bytes * occurrences - _count_dropped_bytes(plan, dropped[kind]),
            dropped_rows=dropped[kind],
        )
    return rows


def _sum_by_kind(rows: Iterable[CollectiveTraffic]) -> dict[Kind, tuple[int, int]]:
    """Sum of calls and bytes by kind."""
    sums: dict[Kind, tuple[int, int]] = {}
    for row in rows:
        kind = (row.axis, row.op, row.phase, row.ranks)
        calls, sent = sums.get(kind, (0, 0))
        sums[kind] = (calls + row.calls, sent + row.bytes)
    return sums


def _sum_dropped_rows(rows: Iterable[MeasuredTraffic]) -> Counter[Kind]:
    """Sum of the rows that the router dropped by kind."""
    sums = Counter[Kind]()
    for row in rows:
        sums[row.axis, row.op, row.phase, row.ranks] += row.dropped_rows
    return sums


def _count_dropped_bytes(plan: PlanContract, rows: int) -> int:
    return rows * routed_row_bytes(plan.job) if rows else 0


def _state_difference(row: StateRow) -> str:
    if row.measured is None:
        return f"rank {row.rank}: {row.kind} was not measured; predicted {format_bytes(row.predicted)}"
    share = (row.measured - row.predicted) / row.predicted if row.predicted else float("inf")
    bound = "at most " if row.compiled else ""
    return (
        f"{_name_generation(row.generation)}rank {row.rank}: {row.kind} is {row.measured} bytes, "
        f"predicted {bound}{row.predicted} "
        f"({share:+.1%}; must be {row.allowed})"
    )


def _name_generation(generation: int | None) -> str:
    return "" if generation is None else f"generation {generation}, "


def _collective_difference(row: CollectiveRow) -> str:
    extra = "" if row.predicted_calls else "; the plan has no such call"
    whose = _name_generation(row.generation) + ("" if row.pp_rank is None else f"pp rank {row.pp_rank}, ")
    return (
        f"{whose}axis {row.axis}, {row.op} in phase {row.phase}: {row.calls} calls and {row.bytes} bytes, "
        f"predicted {row.predicted_calls} and {row.predicted_bytes}{extra}"
    )
