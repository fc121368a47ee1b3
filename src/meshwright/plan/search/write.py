"""The plan file of a layout that is predicted but does not run yet, in the format of those that do."""

from __future__ import annotations

from meshwright.plan.comms import Traffic
from meshwright.plan.contract import Plan, RankPrediction
from meshwright.plan.estimate.state import STATE_LINES
from meshwright.plan.search.predict import Prediction
from meshwright.plan.shapes import count_parameters
from meshwright.plan.time.flops import flops_per_token


def estimated_plan(best: Prediction, reasons: list[str]) -> Plan:
    """What is known of a layout, as a plan: one rank, the fullest, and collectives as sums by axis."""
    job = best.job
    micro, share = best.layout.micro_batch or 1, -(-job.train.global_batch // best.layout.data_degree)
    ledger = best.ledger
    state = {line.name: line.bytes for line in ledger.lines if line.name in STATE_LINES}
    rank = RankPrediction(
        rank=0,
        state_bytes=state,
        peak_bytes=ledger.peak_bytes,
        peak_at=ledger.fullest_at,
        first_peak_bytes=ledger.peaks["first step"],
        activation_bytes=round(best.lines.get("activations", 0.0)),
        lines=ledger.lines,
    )
    rows = (Traffic(t.axis, t.op, t.phase, t.ranks, t.calls, t.bytes) for t in best.traffic)
    return Plan(
        job=job,
        micro_batches=-(-share // micro),
        step_s=best.step_s,
        breakdown_s=best.breakdown_s,
        tokens_per_step=job.train.global_batch * job.data.seq_len,
        flops_per_token=flops_per_token(best.workload.model, job.data.seq_len),
        parameters=count_parameters(best.workload.model),
        ranks=(rank,),
        collectives=tuple(rows),
        buckets=(),
        reasons=tuple(reasons),
        exact=False,
    )
