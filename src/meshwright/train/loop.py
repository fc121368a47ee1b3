"""The training loop: train, evaluate, save; top to bottom.

One step, with gradient accumulation and gradient clipping, is ``trainer.Trainer.train_step``.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

from meshwright.checkpoint.divergence import DivergedError
from meshwright.launch.environment import describe_place
from meshwright.train.bad_step_policy import BadStepPolicy
from meshwright.train.evaluate import evaluate
from meshwright.train.finite_checks import name_cause
from meshwright.train.replica_check import ReplicaCheck
from meshwright.train.step_audit import StepAudit
from meshwright.train.step_result import StepResult
from meshwright.train.stop_signal import StopGrace
from meshwright.train.throughput import ThroughputMeter
from meshwright.train.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Train until the last step of the job, or until a rank is asked to stop."""
    steps, eval_every = trainer.job.train.steps, trainer.job.train.eval_every
    step_to_audit = min(trainer.state.first_step + 1, steps - 1)  # the second one: lazy allocations are done
    meter = start_meter(trainer)
    policy, replicas = BadStepPolicy(), ReplicaCheck(trainer)
    grace = StopGrace(trainer.job.elastic.stop_grace_s)
    evaluations = 0
    stopping = False
    commit_counts(trainer, evaluations)
    while trainer.step < steps and not stopping:
        audited, typical = trainer.step == step_to_audit, trainer.step > step_to_audit
        started = time.perf_counter()
        result = run_step(
            trainer, meter, audited, overlap_next_step=not audited and is_followed_by_step(trainer)
        )
        step_s = time.perf_counter() - started if typical else None
        if step_s is not None:  # the first step may compile, and the audited one is slow
            check_grace(trainer, grace, step_s)
        policy.after_step(trainer, result.bad)
        replicas.after_step(trainer)
        trainer.follow_data(result.data_votes)
        stopping = result.stop_requested and trainer.step < steps
        last = stopping or trainer.step == steps
        eval_loss = None
        if _is_due(eval_every, trainer.step) or (last and not stopping):
            eval_losses = evaluate(trainer)
            eval_loss = eval_losses.get(None)
            evaluations += len(eval_losses)
        trainer.flight_recorder.enter("checkpoint")
        trainer.saver.after_step(last, eval_loss, result.save_requested, step_s)
        commit_counts(trainer, evaluations, replicas.checks)
    if stopping:
        trainer.raise_changed_data()
    report_end(trainer, evaluations, stopping, replicas.checks)


def check_grace(trainer: Trainer, grace: StopGrace, step_s: float) -> None:
    """Report once that a step takes longer than the grace of a scheduler."""
    if grace.is_newly_exceeded(step_s) and trainer.mesh.rank == 0:
        limit = trainer.job.elastic.stop_grace_s
        trainer.events.write("grace_too_short", step=trainer.step, step_s=step_s, stop_grace_s=limit)


def start_meter(trainer: Trainer) -> ThroughputMeter:
    """Start the throughput meter and write the ``ready`` event."""
    meter = ThroughputMeter(trainer.plan, trainer.mesh.device)
    trainer.setup.end("rebuild")
    trainer.events.write(
        "ready",
        step=trainer.step,
        steps=trainer.job.train.steps,
        peak_flops_per_s=meter.peak_flops_per_s,
        peak_basis=meter.peak_basis,
        setup_s=trainer.setup.seconds,
        transport=trainer.mesh.transport_name,
        **describe_place(),
    )
    _report_transport(trainer)
    return meter


def _report_transport(trainer: Trainer) -> None:
    """Report collectives that were planned through shared memory and use gloo."""
    plan, used, host = trainer.plan, trainer.mesh.transport_name, trainer.plan.host_memory
    planned = plan.transport == "shared_memory" and host is not None and host.collective_bytes > 0
    if planned and used == "gloo" and trainer.mesh.rank == 0:
        trainer.events.write("transport_fallback", planned=plan.transport, used=used)


def is_followed_by_step(trainer: Trainer) -> bool:
    """Whether the next step is followed by another step, without an evaluation or a planned save between."""
    train, saver, step = trainer.job.train, trainer.saver, trainer.step + 1
    interrupted = _is_due(train.eval_every, step) or saver.is_due_at(step) or saver.is_due_by_time()
    return step < train.steps and not interrupted


def run_step(
    trainer: Trainer, meter: ThroughputMeter, audited: bool, overlap_next_step: bool = False
) -> StepResult:
    """One step; measured if it is the audited one."""
    audit = StepAudit(trainer) if audited else None
    if trainer.pipeline is not None:  # the first step, the audit and a save distort the timeline
        first_step, saved_step = trainer.state.first_step, trainer.saver.saved_step
        short = trainer.job.train.steps - first_step <= 2
        typical = not audited and trainer.step not in (first_step, saved_step)
        trainer.pipeline.time_next_steps(short or typical)
    try:
        with audit or nullcontext():
            return trainer.train_step(meter, audit, overlap_next_step)
    except DivergedError as error:  # the loss scale collapsed
        raise name_cause(trainer, error, "stop") from None


def report_end(trainer: Trainer, evaluations: int, stopping: bool, replica_checks: int = 0) -> None:
    """Write the last events of a rank that did not fail: its collectives and its number of steps."""
    steps, status = trainer.step - trainer.state.first_step, "interrupted" if stopping else "complete"
    commit_counts(trainer, evaluations, replica_checks)
    report_collectives(trainer)
    if trainer.pipeline is not None:
        trainer.events.write("timeline", **trainer.pipeline.record())
    trainer.events.write("finished", status=status, step=trainer.step, steps=steps)


def commit_counts(trainer: Trainer, evaluations: int, replica_checks: int = 0) -> None:
    """Count the collectives so far as those of whole steps."""
    steps = trainer.step - trainer.state.first_step
    trainer.counter.commit(steps, evaluations, replica_checks)


def report_collectives(trainer: Trainer) -> None:
    """Write the collectives of all whole steps; also of a rank that failed in a later step."""
    counted = trainer.counter.committed()
    if counted is not None:
        trainer.events.write("collectives", **counted)


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
