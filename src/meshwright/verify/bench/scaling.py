"""One rank of ``meshwright bench scaling``: times of steps, and when each gradient bucket is reduced."""

from __future__ import annotations

import time

import torch

from meshwright.core.events import Listener
from meshwright.measure.own_time import read_process_time
from meshwright.parallel.bucket_times import BucketTimes
from meshwright.parallel.ddp import FixedBucketDDP
from meshwright.train.loop import report_end, run_step, start_meter
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_with_trainer


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Measure as this rank; returns the exit status."""
    return run_with_trainer(measure, run_dir, listener)


def measure(trainer: Trainer) -> None:
    """Time ``train.steps`` steps and write the events that the audit needs."""
    meter = start_meter(trainer)
    times = BucketTimes(trainer.mesh.device)
    if isinstance(trainer.module, FixedBucketDDP):
        trainer.module.record_bucket_times(times)
    step_s: list[float] = []
    spent_s: list[tuple[float, float]] = []
    buckets: list[list[tuple[float, float]]] = []
    stopping = False
    while trainer.step < trainer.job.train.steps and not stopping:
        times.begin()
        earlier = read_process_time()
        started = _now(trainer)
        done = run_step(trainer, meter, audited=trainer.step == 1)  # slower, and in the warm-up
        if done.bad is not None:
            raise done.bad.as_error(trainer.job.train.spike_factor, saved=False)
        stopping = done.stop_requested
        step_s.append(_now(trainer) - started)
        spent_s.append(read_process_time().since(earlier))
        buckets.append(times.read())
    if not stopping:
        trainer.events.write("scaling", step_s=step_s, spent_s=spent_s, buckets=buckets)
    report_end(trainer, evaluations=0, stopping=stopping)


def _now(trainer: Trainer) -> float:
    if trainer.mesh.device.type == "cuda":
        torch.cuda.synchronize(trainer.mesh.device)
    return time.perf_counter()
