"""One rank of ``meshwright bench scaling``: what a step costs, and how much of its reductions is hidden.

Three things are timed in the same processes, one after the other in every round, and in the opposite order in
every other round, so that what drifts (temperature, other programs) falls on all three alike:

- ``normal_s``: a step as training does it;
- ``unreduced_s``: the same step, but gradients stay where they are (DDP's ``no_sync``);
- ``reductions_s``: the step's reductions alone, by the same hook on buffers of the same sizes.

Replicas drift apart in the steps that do not reduce. The weights of a benchmark are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.core.events import Listener
from meshwright.run.loop import Meter, train_step
from meshwright.run.parallel.data import HOOKS, FixedBucketDDP
from meshwright.run.session import Session
from meshwright.run.step_audit import StepAudit
from meshwright.run.worker import run_session


def run_rank(run_dir: str, listener: Listener | None = None) -> int:
    """Measure as this rank; returns the exit status."""
    return run_session(measure, run_dir, listener)


def measure(session: Session) -> None:
    """Time ``train.steps`` rounds and report them, with what the audit needs."""
    meter = Meter(session)
    reductions = Reductions(session)
    times: dict[str, list[float]] = {"normal_s": [], "unreduced_s": [], "reductions_s": []}
    rounds = 0
    stopping = False
    while rounds < session.job.train.steps and not stopping:
        normal = _audited if rounds == 1 else train_step  # in the warm-up, because it is slower
        parts: list[tuple[str, Callable[[], bool]]] = [("normal_s", partial(normal, session, meter))]
        if session.ranks.world_size > 1:
            parts.append(("unreduced_s", partial(_unreduced, session, meter)))
            parts.append(("reductions_s", reductions.run))
        for name, part in parts if rounds % 2 == 0 else reversed(parts):
            started = _now(session)
            stopping |= part()
            times[name].append(_now(session) - started)
        rounds += 1
    promised = [row for row in session.counter.rows() if row["phase"] != session.counter.ASIDE]
    session.events.write("collectives", rows=promised, steps=rounds, evaluations=0)
    if not stopping:
        session.events.write(
            "scaling",
            normal_s=times["normal_s"],
            unreduced_s=times["unreduced_s"],
            reductions_s=times["reductions_s"],
        )
    session.events.write(
        "finished", status="interrupted" if stopping else "complete", step=session.step, steps=rounds
    )


def _audited(session: Session, meter: Meter) -> bool:
    session.audit = StepAudit(session)
    with session.audit:
        stopping = train_step(session, meter)
    session.audit = None
    return stopping


def _unreduced(session: Session, meter: Meter) -> bool:
    """The same step without its gradient reductions; every rank goes on with its own gradients."""
    assert isinstance(session.module, FixedBucketDDP), "several ranks are replicas"
    with session.counter.aside(), session.module.no_sync():
        return train_step(session, meter)


def _now(session: Session) -> float:
    if session.ranks.device.type == "cuda":
        torch.cuda.synchronize(session.ranks.device)
    return time.perf_counter()


@dataclass(frozen=True)
class _Bucket:
    """Stands for DDP's bucket in a hook, which asks for nothing but the buffer."""

    content: Tensor

    def buffer(self) -> Tensor:
        """The gradients of the bucket in one piece."""
        return self.content


class Reductions:
    """One step's gradient reductions without the step: every rank sends its buckets and gets the sums."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hook = HOOKS[session.job.compression.kind]
        sizes = {name: parameter.numel() for name, parameter in session.model.named_parameters()}
        device = session.ranks.device
        self._buckets = [
            _Bucket(torch.zeros(sum(sizes[name] for name in names), device=device))
            for names in session.plan.buckets
        ]

    def run(self) -> bool:
        """Reduce all buckets as the backward pass would, each as soon as the one before is under way."""
        ranks = self._session.ranks
        with self._session.counter.aside():
            group = ranks.group("dp_replicate")
            waiting = [self._hook(group, cast(Any, bucket)) for bucket in self._buckets]
            for future in waiting:
                future.wait()
        return False
