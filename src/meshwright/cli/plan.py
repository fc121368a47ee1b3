"""``meshwright plan``."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli.output import Output
from meshwright.core.units import format_bytes, format_count, format_rate, format_seconds
from meshwright.plan.choose import Candidate
from meshwright.plan.compute import UNCERTAINTY, peak_rate
from meshwright.plan.contract import Plan, build_plan, plan_of, write_plan
from meshwright.spec.load import load_job, require_runnable


def show_plan(
    output: Output, source: str, overrides: list[str], on: str | None, top: int, out: Path | None
) -> int:
    """Rank the layouts and show the best one whole."""
    job = load_job(source, overrides, on, to_run=False)
    require_runnable(job)  # what follows predicts one process and replicas alone
    plan, search = build_plan(job)
    if out is not None:
        write_plan(plan, out)
    shown = [plan, *(plan_of(job, c, []) for c in search.candidates[1:top])]
    describe_plan(output, plan)
    if len(search.candidates) > 1:
        rows = [_row(c) for c in search.candidates[: min(top, 12)]]
        output.say()
        output.table("Layouts, best first", ("layout", "micro-batch", "step", "peak a device", "fits"), rows)
    if out is not None:
        output.say(f"\nwritten to {out}")
    output.result(
        {
            "evaluated": search.evaluated,
            "pruned": 0,
            "illegal": search.illegal,
            "fit": len(search.fitting),
            "search_s": search.seconds,
            "layouts": [p.summary() for p in shown],
        }
    )
    return 0


def describe_plan(output: Output, plan: Plan) -> None:
    """The choice, its reasons, its ledger and its collectives."""
    job = plan.job
    cluster = f"{job.cluster.device_name}, {job.cluster.preset or job.cluster.file}"
    ranks, devices = plan.world_size, job.cluster.world_size
    share = (
        f"on {ranks} of {devices} devices" if ranks <= devices else f"in {ranks} ranks on {devices} devices"
    )
    output.say(f"{job.name}: {format_count(plan.parameters)} parameters {share} ({cluster})")
    for reason in plan.reasons:
        output.say(f"  {reason}")
    low, high = format_seconds(plan.step_s / UNCERTAINTY), format_seconds(plan.step_s * UNCERTAINTY)
    rate = format_rate(plan.tokens_per_step / plan.step_s, job.unit)
    output.say(
        f"  predicted step {format_seconds(plan.step_s)} ({low} to {high}), {rate}, MFU {plan.mfu:.0%}"
    )
    _, peak = peak_rate(job.cluster, job.train.precision)
    output.say(f"  MFU counts against {peak}; rates: {job.cluster.basis}")
    rank = plan.ranks[0]
    rows = [(line.name, format_bytes(line.bytes), line.formula) for line in rank.lines]
    rows.append(("peak in a step", format_bytes(rank.peak_bytes), f"at: {rank.peak_at}"))
    output.say()
    output.table("Memory of every rank", ("", "bytes", "formula"), rows)
    if plan.collectives:
        moved = [
            (t.axis, t.op, t.phase, str(t.ranks), str(t.calls), format_bytes(t.bytes))
            for t in plan.collectives
        ]
        output.say()
        output.table(
            "Collectives of every rank, each time", ("axis", "op", "phase", "ranks", "calls", "bytes"), moved
        )


def _row(candidate: Candidate) -> tuple[str, ...]:
    return (
        candidate.name,
        str(candidate.layout.micro_batch),
        format_seconds(candidate.time.total_s),
        format_bytes(candidate.ledger.peak_bytes),
        "yes" if candidate.fits else "no",
    )
