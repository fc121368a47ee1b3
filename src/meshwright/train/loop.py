"""The training loop: forward, backward, update, report, evaluate, save; top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.manifest import mark_best, rotate
from meshwright.core.files import folder_bytes
from meshwright.layout.lr_schedule import lr_at
from meshwright.models.decoder import Decoder
from meshwright.parallel.apply import agree_on_statistics, without_reduction
from meshwright.parallel.batch import Batch
from meshwright.parallel.mesh import Sums
from meshwright.train.divergence import not_finite
from meshwright.train.expert_balance import ExpertLoad, load_due
from meshwright.train.gradient_noise import add_noise
from meshwright.train.optimizer import set_lr, writes_copies
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Session, save, take_snapshot
from meshwright.train.utilisation import Utilisation, find_peak


def train(session: Session) -> None:
    """Train until the job's last step, or until a rank wants to stop."""
    job = session.job
    first_step = session.first_step = session.step
    audited_step = min(first_step + 1, job.train.steps - 1)  # the second one, if there is one: nothing is new
    meter = Meter(session)
    saver = Saver(session)
    evaluations = 0
    stopping = False
    while session.step < job.train.steps and not stopping:
        audited = session.step == audited_step
        stopping = take_step(session, meter, audited, onward=not audited and goes_on(session))
        last = stopping or session.step == job.train.steps
        eval_loss = None
        if _due(job.train.eval_every, session.step) or (last and not stopping):
            eval_loss = evaluate(session)
            evaluations += eval_loss is not None
        saver.after_step(last, eval_loss)
    report_end(session, evaluations, stopping, saver.saves)


def goes_on(session: Session) -> bool:
    """Whether the next step will come right after this one, as far as is known before it."""
    train, keep, step = session.job.train, session.job.checkpoint, session.step + 1
    due = _due(train.eval_every, step) or _due(keep.every_steps, step) or session.save_due()
    return step < train.steps and not due


def reads_early(session: Session) -> bool:
    """Whether a step's numbers can be read while the device is still at work on its update.

    They are known before it. On one GPU the host then reports the step and queues the next one meanwhile, and
    the device never waits for the host. With other ranks the sum over all of them comes last: it says that
    each has come to the end of the step. State that lies on the host is moved with its help.
    """
    ranks = session.ranks
    return ranks.device.type == "cuda" and ranks.control is None and session.streamed is None


def take_step(session: Session, meter: Meter, audited: bool, onward: bool = False) -> bool:
    """One step, watched if it is the audited one; returns whether a rank wants to stop after it."""
    audit = session.audit = StepAudit(session) if audited else None
    if session.pipeline is not None:  # what is new in a first step, looking on, and saving take time
        short = session.job.train.steps - session.first_step <= 2
        usual = not audited and session.step not in (session.first_step, session.saved_step)
        session.pipeline.times.counts = short or usual
    with audit or nullcontext():
        return train_step(session, meter, onward)


def report_end(session: Session, evaluations: int, stopping: bool, saves: int = 0) -> None:
    """The last events of a rank that ended well: what it sent, and how far it came in this attempt."""
    steps, status = session.step - session.first_step, "interrupted" if stopping else "complete"
    times = {"steps": steps, "evaluations": evaluations, "saves": saves}
    session.events.write("collectives", rows=session.counter.rows(), **times)
    if session.pipeline is not None:
        session.events.write("timeline", **session.pipeline.record())
    session.events.write("finished", status=status, step=session.step, steps=steps)


@dataclass(frozen=True)
class Computed:
    """What a step gave; sums are over all ranks."""

    loss_sum: float
    counted: float
    """Targets that were trained on."""
    stops: float
    """Ranks that want to stop."""
    noise_sums: list[float]
    loss_scale: float
    lr: float
    grad_norm: float | None
    load: ExpertLoad | None
    """What experts had to do, where there are some."""


def compute_step(
    session: Session,
    micro_batches: Iterable[Batch],
    targets: int,
    meanwhile: Callable[[], None] = lambda: None,
    onward: bool = False,
) -> Computed:
    """Everything that a step computes and sends: gradients, the update, and the sums over all ranks.

    Args:
        session: The rank.
        micro_batches: What it trains on.
        targets: Those of all ranks.
        meanwhile: Called when all work of the step is queued, before the host waits for the device.
        onward: Whether another step comes right after: then its update need not be over when this returns.
    """
    session.counter.phase = "step"
    session.noise_scale.begin(session.step + 1)
    divisor = max(targets, 1)  # a batch of nothing but long, masked prompts has none, and no gradient
    own_loss, own_targets = forward_backward(session, micro_batches, divisor)
    if session.audit is not None:
        session.audit.after_backward()
    noise = session.noise_scale.parts(divisor, own_targets)
    loss_scale = session.precision.scale() if noise else 1.0
    lr = lr_at(session.step, session.job.train)
    asked: list[Sums] = []

    def ask(grad_norm: Tensor | None) -> None:
        asked.append(_begin_sums(session, own_loss, own_targets, noise, grad_norm))

    early = onward and reads_early(session)
    grad_norm = update(session, lr, ask) if early else update(session, lr)
    agree_on_statistics(session.model, session.job, session.ranks)
    meanwhile()
    if not early:
        ask(grad_norm)
    # The first look at a device value in this step: all its work is queued by now.
    loss_sum, counted, stops, *sums = asked[0].wait()
    norm = None if grad_norm is None else sums.pop()
    session.save_wanted = session.owned.cut_up and sums.pop(0) > 0
    load = None if session.balancer is None else session.balancer.end_step(session.ranks)
    return Computed(loss_sum, counted, stops, sums, loss_scale, lr, norm, load)


def _begin_sums(
    session: Session,
    own_loss: Tensor,
    own_targets: int,
    noise: Sequence[Tensor | float],
    grad_norm: Tensor | None,
) -> Sums:
    """Ask for a step's numbers: every rank sends its own and gets the sums, with its norm beside them."""
    wishes = [float(session.stop_wanted)]
    if session.owned.cut_up:  # all ranks take part in a checkpoint, and rank 0 knows when
        wishes.append(float(session.ranks.rank == 0 and session.save_due()))
    own = [own_loss, own_targets] if session.ranks.speaks else [0.0, 0.0]
    norms = [] if grad_norm is None else [grad_norm]
    return session.ranks.begin_sum([*own, *wishes, *noise], beside=norms)


def train_step(session: Session, meter: Meter, onward: bool = False) -> bool:
    """One optimizer step with its event; returns whether a rank wants to stop after it.

    Its time ends when its numbers are known. Where they are read early, that is before its update, which is
    then a part of the next step's time: of steps in a row the first is short of one, the last has two.
    """
    started = time.perf_counter()
    _, samples, targets, micro_batches = session.feed.take(session.position)

    def prepare_next() -> None:
        if session.step + 1 < session.job.train.steps:
            session.feed.prepare(session.position + len(samples))

    done = compute_step(session, micro_batches, targets, prepare_next, onward)
    assert done.counted == targets, f"{done.counted:.0f} targets were trained on, {targets} were expected"
    session.step += 1
    session.position += len(samples)
    # A mean over nothing is no number, and no zero either.
    loss = done.loss_sum / targets if targets else None
    step_s = time.perf_counter() - started
    session.events.write(
        "step",
        step=session.step,
        loss=loss,
        grad_norm=done.grad_norm,
        lr=done.lr,
        noise_scale=session.noise_scale.estimate(done.noise_sums, len(samples), done.loss_scale),
        tokens=targets,
        step_s=step_s,
        **meter.read(targets / step_s),
        **session.precision.look(loss, done.grad_norm),
        **({} if done.load is None else done.load.figures()),
    )
    if done.load is not None and session.ranks.rank == 0 and load_due(session.step, session.job.train.steps):
        session.events.write("experts", step=session.step, layers=done.load.rows())
    session.precision.require_scale(session.step, session.has_checkpoint)
    if not session.precision.skipped:
        _require_finite(session, loss=loss, gradient_norm=done.grad_norm)
    return done.stops > 0


def _require_finite(session: Session, **figures: float | None) -> None:
    for name, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise not_finite(name.replace("_", " "), value, session.step, session.has_checkpoint())


def forward_backward(session: Session, batches: Iterable[Batch], divisor: int) -> tuple[Tensor, int]:
    """Gradients of one step; returns this rank's summed loss and its number of targets."""
    device = session.ranks.device
    micro_batches = session.plan.micro_batches
    if session.pipeline is not None:
        found = session.pipeline.train(batches, divisor, session.audit)
        session.owned.complete_gradients()
        return found
    if isinstance(session.model, Decoder):
        session.model.expect_gradient(1 / divisor)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    targets_seen = 0
    for index, batch in enumerate(batches):
        if session.audit is not None:
            session.audit.before_forward(index)
        with without_reduction(session.module, session.job, last=index == micro_batches - 1):
            with session.precision.products():
                loss = session.module(*batch.on(device))
            if session.audit is not None:
                session.audit.after_forward()
                session.audit.before_backward(index)
            if session.reducer is not None:
                session.reducer.begin(last=index == micro_batches - 1)
            session.precision.backward(loss / divisor)
        targets_seen += int((batch.targets >= 0).sum())  # while the device is at work
        session.noise_scale.after_micro_batch(targets_seen)
        loss_sum += loss.detach()
    if session.reducer is not None:
        session.reducer.finish()
    session.owned.complete_gradients()
    return loss_sum, targets_seen


def update(
    session: Session, lr: float, known: Callable[[Tensor | None], None] = lambda _: None
) -> Tensor | None:
    """Clip, step, clear; returns the gradient norm of the whole model where it was needed.

    Args:
        session: The rank.
        lr: The rate of this step.
        known: Told the norm before anything moves.
    """
    precision, owned = session.precision, session.owned
    owned.take_gradients()
    grad_norm = precision.clip(owned, session.optimizer, session.job.train.clip)
    known(grad_norm)
    add_noise(owned, session.job.train, session.step)
    set_lr(session.optimizer, lr)
    precision.step(session.optimizer)
    owned.publish()
    owned.drop_gradients()
    if session.working is not None:
        session.working.stale = not writes_copies(session.optimizer)
    return grad_norm


@torch.no_grad()
def evaluate(session: Session) -> float | None:
    """Loss on the first held-out samples, the same ones every time; None if there are none."""
    session.counter.phase = "eval"
    available = len(session.eval_batches.dataset)
    samples = np.arange(min(available, session.job.train.eval_samples))
    if not len(samples):
        session.events.write("no_evaluation", reason="the held-out split has less than one sample")
        return None
    # Each micro-batch gathers, sums or sends: as many as were promised, however few samples are held out.
    layout = session.job.layout
    moves = layout.zero == 3 or max(layout.pp, layout.cp, layout.tp, layout.ep * layout.etp) > 1
    batches = session.eval_batches.micro_batches(samples, session.job.train.eval_samples if moves else 0)
    found: tuple[Tensor | float, int]
    if session.pipeline is not None:
        found = session.pipeline.evaluate(batches)
    else:
        found = _evaluate_whole(session, batches)
    session.owned.end_evaluation()
    loss_sum, counted = session.ranks.add_up(found if session.ranks.speaks else (0.0, 0.0))
    if not counted:
        reason = f"the first {len(samples)} held-out samples hold masked prompts alone"
        session.events.write("no_evaluation", reason=reason)
        return None
    session.events.write("eval", step=session.step, loss=loss_sum / counted, samples=len(samples))
    return loss_sum / counted


def _evaluate_whole(session: Session, batches: Iterable[Batch]) -> tuple[Tensor, int]:
    """The summed loss and the targets of micro-batches, where the model is not cut into stages."""
    device = session.ranks.device
    loss_sum, targets_seen = torch.zeros((), dtype=torch.float64, device=device), 0
    session.model.train(not session.job.mixes_samples)  # else a batch norm reads its running statistics
    for batch in batches:
        with session.precision.products():
            loss_sum += session.model(*batch.on(device))
        targets_seen += int((batch.targets >= 0).sum())
    session.model.train()
    return loss_sum, targets_seen


class Meter:
    """Turns tokens a second into MFU, and knows how busy the device is."""

    def __init__(self, session: Session) -> None:
        peak_flops, basis = find_peak(session.job, session.ranks.device)
        steps = session.job.train.steps
        session.events.write(
            "ready", step=session.step, steps=steps, peak_flops_per_s=peak_flops, peak_basis=basis
        )
        self._mfu_of_rate = session.plan.flops_per_token / session.ranks.world_size / peak_flops
        self._utilisation = Utilisation(session.ranks.device)

    def read(self, tokens_per_s: float) -> dict[str, float | None]:
        """The figures of a step that has just ended."""
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self._mfu_of_rate,
            "utilisation": self._utilisation.look(),
        }


class Saver:
    """Decides when rank 0 saves; the others go on and meet it in the next reduction.

    Where tensors are cut, all ranks come to the same decision and hand over their parts first.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.saves = 0
        """Checkpoints that this rank had a part in."""

    def after_step(self, last: bool, eval_loss: float | None) -> None:
        """Save if it is time, at the end, or if the evaluation is the best so far."""
        session, keep = self._session, self._session.job.checkpoint
        cut_up = session.owned.cut_up
        if session.ranks.rank != 0 and not cut_up:
            return
        timely = session.save_wanted if cut_up else session.save_due()
        best = keep.on_best and eval_loss is not None and eval_loss < session.best_eval_loss
        if eval_loss is not None:
            session.best_eval_loss = min(eval_loss, session.best_eval_loss)
        if last or best or timely or _due(keep.every_steps, session.step):
            self.saves += 1
            session.saved_at, session.saved_step = time.monotonic(), session.step
            self._save(eval_loss, best)

    def _save(self, eval_loss: float | None, best: bool) -> None:
        session = self._session
        started = time.perf_counter()
        session.counter.phase = "save"
        snapshot = take_snapshot(session)
        if session.ranks.rank != 0:
            snapshot.skip_rest()
            return
        try:
            path = save(session, snapshot, eval_loss)
            if best:
                mark_best(path.parent, path)
            rotate(path.parent, session.job.checkpoint.keep_last, path)
        except OSError as error:  # a full disk costs a checkpoint, not the run
            snapshot.skip_rest()
            session.events.write("checkpoint_failed", step=session.step, reason=str(error))
            return
        seconds = time.perf_counter() - started
        session.events.write(
            "checkpoint", step=session.step, path=str(path), bytes=folder_bytes(path), seconds=seconds
        )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
