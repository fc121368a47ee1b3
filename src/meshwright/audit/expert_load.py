"""Predicted memory of a rank under its measured expert load.

A plan assumes an even load. A rank whose experts read more rows keeps more activations per layer. The same
memory ledger predicts it from the measured rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.audit.record import MeasuredMemory, RunRecord
from meshwright.core.units import format_bytes
from meshwright.layout.stages import pp_rank_of
from meshwright.plan.contract import PlanContract, RankPrediction
from meshwright.plan.memory.ledger import predict_ledger


@dataclass(frozen=True)
class LoadEffect:
    """Bytes that uneven expert load adds to a rank's prediction."""

    share: float
    """Rows relative to an even load, minus one."""
    activations: int
    peak: int


EVEN = LoadEffect(0.0, 0, 0)


def find_effect(plan: PlanContract, predicted: RankPrediction, found: MeasuredMemory | None) -> LoadEffect:
    """The effect on one rank; zero for a dense model or if rows were not counted.

    A pipeline keeps several micro-batches in flight: its peak is that of the mean.
    """
    if found is None or found.routed_rows is None or not predicted.routed_rows:
        return EVEN
    job, fullest = plan.job, found.routed_rows.fullest
    sizes = (job, job.layout.micro_batch or 1, plan.micro_batches, pp_rank_of(job, predicted.rank))
    even, full = predict_ledger(*sizes), predict_ledger(*sizes, rows=fullest)
    at_peak = full if job.layout.pp == 1 else predict_ledger(*sizes, rows=found.routed_rows.mean)
    peaks = [ledger.first_peak_bytes if found.first_step else ledger.peak_bytes for ledger in (even, at_peak)]
    share = sum(fullest) / (predicted.routed_rows * len(fullest)) - 1
    return LoadEffect(share, full.activation_bytes - even.activation_bytes, peaks[1] - peaks[0])


def describe_load(plan: PlanContract, record: RunRecord) -> list[str]:
    """Sentences about the ranks with the most and the fewest rows; none for an even load."""
    effects = {p.rank: find_effect(plan, p, record.state.get(p.rank)) for p in plan.ranks}
    ranks = sorted(effects, key=lambda rank: effects[rank].share)
    chosen = dict.fromkeys((ranks[0], ranks[-1]))
    return [_describe(rank, effects[rank]) for rank in sorted(chosen) if effects[rank] != EVEN]


def _describe(rank: int, effect: LoadEffect) -> str:
    more = "more" if effect.share > 0 else "fewer"
    return (
        f"rank {rank}: its experts read {abs(effect.share):.1%} {more} rows than with an even load: "
        f"{_signed(effect.activations)} of activations and {_signed(effect.peak)} at the peak expected"
    )


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"
