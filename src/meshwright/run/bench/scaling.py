"""One rank of ``meshwright bench scaling``: real steps, and when their buckets are ready and reduced."""

from __future__ import annotations

import time

import torch

from meshwright.core.events import Listener
from meshwright.run.loop import Meter, train_step
from meshwright.run.parallel.bucket_times import BucketTimes
from meshwright.run.parallel.data import FixedBucketDDP
from meshwright.run.session import Session
from meshwright.run.step_audit import StepAudit
from meshwright.run.worker import run_session


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Measure as this rank; returns the exit status."""
    return run_session(measure, run_dir, listener)


def measure(session: Session) -> None:
    """Time ``train.steps`` steps and report them, with what the audit needs."""
    meter = Meter(session)
    moments = BucketTimes(session.ranks.device)
    if isinstance(session.module, FixedBucketDDP):
        session.module.times = moments
    step_s: list[float] = []
    buckets: list[list[tuple[float, float]]] = []
    stopping = False
    while session.step < session.job.train.steps and not stopping:
        moments.begin()
        started = _now(session)
        stopping = _audited(session, meter) if session.step == 1 else train_step(session, meter)
        step_s.append(_now(session) - started)
        buckets.append(moments.read())
    steps = session.step
    session.events.write("collectives", rows=session.counter.rows(), steps=steps, evaluations=0)
    if not stopping:
        session.events.write("scaling", step_s=step_s, buckets=buckets)
    session.events.write(
        "finished", status="interrupted" if stopping else "complete", step=session.step, steps=steps
    )


def _audited(session: Session, meter: Meter) -> bool:
    """The second step, which is audited and slower; it is in the warm-up."""
    session.audit = StepAudit(session)
    with session.audit:
        stopping = train_step(session, meter)
    session.audit = None
    return stopping


def _now(session: Session) -> float:
    if session.ranks.device.type == "cuda":
        torch.cuda.synchronize(session.ranks.device)
    return time.perf_counter()
