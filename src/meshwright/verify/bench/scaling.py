"""One rank of ``meshwright bench scaling``: real steps, and when their buckets are ready and reduced."""

from __future__ import annotations

import time

import torch

from meshwright.core.events import Listener
from meshwright.parallel.bucket_times import BucketTimes
from meshwright.parallel.ddp import FixedBucketDDP
from meshwright.train.loop import Meter, report_end, take_step
from meshwright.train.trainer import Session
from meshwright.train.worker import run_session


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
        stopping = take_step(session, meter, audited=session.step == 1)  # slower, and in the warm-up
        step_s.append(_now(session) - started)
        buckets.append(moments.read())
    if not stopping:
        session.events.write("scaling", step_s=step_s, buckets=buckets)
    report_end(session, evaluations=0, stopping=stopping)


def _now(session: Session) -> float:
    if session.ranks.device.type == "cuda":
        torch.cuda.synchronize(session.ranks.device)
    return time.perf_counter()
