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
from meshwright.parallel.apply import gradient_sync, sync_batch_norm_stats
from meshwright.parallel.batch import Batch
from meshwright.parallel.mesh import ControlAllReduce
from meshwright.train.divergence import non_finite_error
from meshwright.train.expert_balance import ExpertLoad, is_load_report_due
from meshwright.train.gradient_noise import add_noise
from meshwright.train.optimizer import set_lr, updates_weight_copies
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer, save, take_snapshot
from meshwright.train.utilisation import Utilisation, find_peak_flops


def train(trainer: Trainer) -> None:
    """Train until the job's last step, or until a rank wants to stop."""
    job = trainer.job
    first_step = trainer.first_step = trainer.step
    step_to_audit = min(
        first_step + 1, job.train.steps - 1
    )  # the second one, if there is one: nothing is new
    meter = ThroughputMeter(trainer)
    saver = Saver(trainer)
    evaluations = 0
    stopping = False
    while trainer.step < job.train.steps and not stopping:
        audited = trainer.step == step_to_audit
        stopping = audited_step(
            trainer, meter, audited, overlap_next_step=not audited and is_followed_by_step(trainer)
        )
        last = stopping or trainer.step == job.train.steps
        eval_loss = None
        if _due(job.train.eval_every, trainer.step) or (last and not stopping):
            eval_loss = evaluate(trainer)
            evaluations += eval_loss is not None
        saver.after_step(last, eval_loss)
    report_end(trainer, evaluations, stopping, saver.saves)


def is_followed_by_step(trainer: Trainer) -> bool:
    """Whether the next step will come right after this one, as far as is known before it."""
    train, keep, step = trainer.job.train, trainer.job.checkpoint, trainer.step + 1
    due = _due(train.eval_every, step) or _due(keep.every_steps, step) or trainer.is_save_due()
    return step < train.steps and not due


def can_read_loss_early(trainer: Trainer) -> bool:
    """Whether a step's numbers can be read while the device is still at work on its update.

    They are known before it. On one GPU the host then reports the step and queues the next one meanwhile, and
    the device never waits for the host. With other ranks the sum over all of them comes last: it says that
    each has come to the end of the step. State that lies on the host is moved with its help.
    """
    mesh = trainer.mesh
    return mesh.device.type == "cuda" and mesh.control is None and trainer.offloaded is None


def audited_step(
    trainer: Trainer, meter: ThroughputMeter, audited: bool, overlap_next_step: bool = False
) -> bool:
    """One step, watched if it is the audited one; returns whether a rank wants to stop after it."""
    audit = trainer.audit = StepAudit(trainer) if audited else None
    if trainer.pipeline is not None:  # what is new in a first step, looking on, and saving take time
        short = trainer.job.train.steps - trainer.first_step <= 2
        usual = not audited and trainer.step not in (trainer.first_step, trainer.saved_step)
        trainer.pipeline.times.counts = short or usual
    with audit or nullcontext():
        return train_step(trainer, meter, overlap_next_step)


def report_end(trainer: Trainer, evaluations: int, stopping: bool, saves: int = 0) -> None:
    """The last events of a rank that ended well: what it sent, and how far it came in this attempt."""
    steps, status = trainer.step - trainer.first_step, "interrupted" if stopping else "complete"
    times = {"steps": steps, "evaluations": evaluations, "saves": saves}
    trainer.events.write("collectives", rows=trainer.counter.rows(), **times)
    if trainer.pipeline is not None:
        trainer.events.write("timeline", **trainer.pipeline.record())
    trainer.events.write("finished", status=status, step=trainer.step, steps=steps)


@dataclass(frozen=True)
class StepResult:
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
    trainer: Trainer,
    micro_batches: Iterable[Batch],
    targets: int,
    prefetch: Callable[[], None] = lambda: None,
    overlap_next_step: bool = False,
) -> StepResult:
    """Everything that a step computes and sends: gradients, the update, and the sums over all ranks.

    Args:
        trainer: The rank.
        micro_batches: What it trains on.
        targets: Those of all ranks.
        prefetch: Called when all work of the step is queued, before the host waits for the device.
        overlap_next_step: Whether another step follows: then its update need not be over when this returns.
    """
    trainer.counter.phase = "step"
    trainer.noise_scale.begin(trainer.step + 1)
    divisor = max(targets, 1)  # a batch of nothing but long, masked prompts has none, and no gradient
    own_loss, own_targets = forward_backward(trainer, micro_batches, divisor)
    if trainer.audit is not None:
        trainer.audit.after_backward()
    noise = trainer.noise_scale.parts(divisor, own_targets)
    loss_scale = trainer.amp.loss_scale() if noise else 1.0
    lr = lr_at(trainer.step, trainer.job.train)
    asked: list[ControlAllReduce] = []

    def ask(grad_norm: Tensor | None) -> None:
        asked.append(_begin_sums(trainer, own_loss, own_targets, noise, grad_norm))

    early = overlap_next_step and can_read_loss_early(trainer)
    grad_norm = update(trainer, lr, ask) if early else update(trainer, lr)
    sync_batch_norm_stats(trainer.model, trainer.job, trainer.mesh)
    prefetch()
    if not early:
        ask(grad_norm)
    # The first look at a device value in this step: all its work is queued by now.
    loss_sum, counted, stops, *sums = asked[0].wait()
    norm = None if grad_norm is None else sums.pop()
    trainer.save_requested = trainer.sharded_state.is_sharded and sums.pop(0) > 0
    load = None if trainer.balancer is None else trainer.balancer.end_step(trainer.mesh)
    return StepResult(loss_sum, counted, stops, sums, loss_scale, lr, norm, load)


def _begin_sums(
    trainer: Trainer,
    own_loss: Tensor,
    own_targets: int,
    noise: Sequence[Tensor | float],
    grad_norm: Tensor | None,
) -> ControlAllReduce:
    """Ask for a step's numbers: every rank sends its own and gets the sums, with its norm beside them."""
    wishes = [float(trainer.stop_requested)]
    if trainer.sharded_state.is_sharded:  # all ranks take part in a checkpoint, and rank 0 knows when
        wishes.append(float(trainer.mesh.rank == 0 and trainer.is_save_due()))
    own = [own_loss, own_targets] if trainer.mesh.reports_loss else [0.0, 0.0]
    norms = [] if grad_norm is None else [grad_norm]
    return trainer.mesh.start_control_all_reduce([*own, *wishes, *noise], beside=norms)


def train_step(trainer: Trainer, meter: ThroughputMeter, overlap_next_step: bool = False) -> bool:
    """One optimizer step with its event; returns whether a rank wants to stop after it.

    Its time ends when its numbers are known. Where they are read early, that is before its update, which is
    then a part of the next step's time: of steps in a row the first is short of one, the last has two.
    """
    started = time.perf_counter()
    _, samples, targets, micro_batches = trainer.prefetcher.get(trainer.position)

    def prepare_next() -> None:
        if trainer.step + 1 < trainer.job.train.steps:
            trainer.prefetcher.prefetch(trainer.position + len(samples))

    done = compute_step(trainer, micro_batches, targets, prepare_next, overlap_next_step)
    assert done.counted == targets, f"{done.counted:.0f} targets were trained on, {targets} were expected"
    trainer.step += 1
    trainer.position += len(samples)
    # A mean over nothing is no number, and no zero either.
    loss = done.loss_sum / targets if targets else None
    step_s = time.perf_counter() - started
    trainer.events.write(
        "step",
        step=trainer.step,
        loss=loss,
        grad_norm=done.grad_norm,
        lr=done.lr,
        noise_scale=trainer.noise_scale.estimate(done.noise_sums, len(samples), done.loss_scale),
        tokens=targets,
        step_s=step_s,
        **meter.read(targets / step_s),
        **trainer.amp.step_fields(loss, done.grad_norm),
        **({} if done.load is None else done.load.figures()),
    )
    if (
        done.load is not None
        and trainer.mesh.rank == 0
        and is_load_report_due(trainer.step, trainer.job.train.steps)
    ):
        trainer.events.write("experts", step=trainer.step, layers=done.load.rows())
    trainer.amp.check_loss_scale(trainer.step, trainer.has_checkpoint)
    if not trainer.amp.skipped:
        _require_finite(trainer, loss=loss, gradient_norm=done.grad_norm)
    return done.stops > 0


def _require_finite(trainer: Trainer, **figures: float | None) -> None:
    for name, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise non_finite_error(name.replace("_", " "), value, trainer.step, trainer.has_checkpoint())


def forward_backward(trainer: Trainer, batches: Iterable[Batch], divisor: int) -> tuple[Tensor, int]:
    """Gradients of one step; returns this rank's summed loss and its number of targets."""
    device = trainer.mesh.device
    micro_batches = trainer.plan.micro_batches
    if trainer.pipeline is not None:
        found = trainer.pipeline.train(batches, divisor, trainer.audit)
        trainer.sharded_state.finalize_grads()
        return found
    if isinstance(trainer.model, Decoder):
        trainer.model.set_expected_loss_grad(1 / divisor)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    targets_seen = 0
    for index, batch in enumerate(batches):
        if trainer.audit is not None:
            trainer.audit.before_forward(index)
        with gradient_sync(trainer.module, trainer.job, last=index == micro_batches - 1):
            with trainer.amp.autocast():
                loss = trainer.module(*batch.to_device(device))
            if trainer.audit is not None:
                trainer.audit.after_forward()
                trainer.audit.before_backward(index)
            if trainer.reducer is not None:
                trainer.reducer.begin(last=index == micro_batches - 1)
            trainer.amp.backward(loss / divisor)
        targets_seen += int((batch.targets >= 0).sum())  # while the device is at work
        trainer.noise_scale.after_micro_batch(targets_seen)
        loss_sum += loss.detach()
    if trainer.reducer is not None:
        trainer.reducer.finish()
    trainer.sharded_state.finalize_grads()
    return loss_sum, targets_seen


def update(
    trainer: Trainer, lr: float, known: Callable[[Tensor | None], None] = lambda _: None
) -> Tensor | None:
    """Clip, step, clear; returns the gradient norm of the whole model where it was needed.

    Args:
        trainer: The rank.
        lr: The rate of this step.
        known: Told the norm before anything moves.
    """
    amp, sharded_state = trainer.amp, trainer.sharded_state
    sharded_state.assign_shard_grads()
    grad_norm = amp.clip_gradients(sharded_state, trainer.optimizer, trainer.job.train.clip)
    known(grad_norm)
    add_noise(sharded_state, trainer.job.train, trainer.step)
    set_lr(trainer.optimizer, lr)
    amp.step(trainer.optimizer)
    sharded_state.all_gather_parameters()
    sharded_state.zero_grads()
    if trainer.weight_copies is not None:
        trainer.weight_copies.is_stale = not updates_weight_copies(trainer.optimizer)
    return grad_norm


@torch.no_grad()
def evaluate(trainer: Trainer) -> float | None:
    """Loss on the first held-out samples, the same ones every time; None if there are none."""
    trainer.counter.phase = "eval"
    available = len(trainer.eval_batches.dataset)
    samples = np.arange(min(available, trainer.job.train.eval_samples))
    if not len(samples):
        trainer.events.write("no_evaluation", reason="the held-out split has less than one sample")
        return None
    # Each micro-batch gathers, sums or sends: as many as were promised, however few samples are held out.
    layout = trainer.job.layout
    moves = layout.zero == 3 or max(layout.pp, layout.cp, layout.tp, layout.ep * layout.etp) > 1
    batches = trainer.eval_batches.micro_batches(samples, trainer.job.train.eval_samples if moves else 0)
    found: tuple[Tensor | float, int]
    if trainer.pipeline is not None:
        found = trainer.pipeline.evaluate(batches)
    else:
        found = _evaluate_whole(trainer, batches)
    trainer.sharded_state.reshard_after_eval()
    loss_sum, counted = trainer.mesh.all_reduce_scalars(found if trainer.mesh.reports_loss else (0.0, 0.0))
    if not counted:
        reason = f"the first {len(samples)} held-out samples hold masked prompts alone"
        trainer.events.write("no_evaluation", reason=reason)
        return None
    trainer.events.write("eval", step=trainer.step, loss=loss_sum / counted, samples=len(samples))
    return loss_sum / counted


def _evaluate_whole(trainer: Trainer, batches: Iterable[Batch]) -> tuple[Tensor, int]:
    """The summed loss and the targets of micro-batches, where the model is not cut into stages."""
    device = trainer.mesh.device
    loss_sum, targets_seen = torch.zeros((), dtype=torch.float64, device=device), 0
    trainer.model.train(not trainer.job.mixes_samples)  # else a batch norm reads its running statistics
    for batch in batches:
        with trainer.amp.autocast():
            loss_sum += trainer.model(*batch.to_device(device))
        targets_seen += int((batch.targets >= 0).sum())
    trainer.model.train()
    return loss_sum, targets_seen


class ThroughputMeter:
    """Turns tokens a second into MFU, and knows how busy the device is."""

    def __init__(self, trainer: Trainer) -> None:
        peak_flops, basis = find_peak_flops(trainer.job, trainer.mesh.device)
        steps = trainer.job.train.steps
        trainer.events.write(
            "ready", step=trainer.step, steps=steps, peak_flops_per_s=peak_flops, peak_basis=basis
        )
        self._mfu_of_rate = trainer.plan.flops_per_token / trainer.mesh.world_size / peak_flops
        self._utilisation = Utilisation(trainer.mesh.device)

    def read(self, tokens_per_s: float) -> dict[str, float | None]:
        """The figures of a step that has just ended."""
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self._mfu_of_rate,
            "utilisation": self._utilisation.read(),
        }


class Saver:
    """Decides when rank 0 saves; the others go on and meet it in the next reduction.

    Where tensors are cut, all ranks come to the same decision and hand over their parts first.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.saves = 0
        """Checkpoints that this rank had a part in."""

    def after_step(self, last: bool, eval_loss: float | None) -> None:
        """Save if it is time, at the end, or if the evaluation is the best so far."""
        trainer, keep = self._trainer, self._trainer.job.checkpoint
        is_sharded = trainer.sharded_state.is_sharded
        if trainer.mesh.rank != 0 and not is_sharded:
            return
        timely = trainer.save_requested if is_sharded else trainer.is_save_due()
        best = keep.on_best and eval_loss is not None and eval_loss < trainer.best_eval_loss
        if eval_loss is not None:
            trainer.best_eval_loss = min(eval_loss, trainer.best_eval_loss)
        if last or best or timely or _due(keep.every_steps, trainer.step):
            self.saves += 1
            trainer.saved_at, trainer.saved_step = time.monotonic(), trainer.step
            self._save(eval_loss, best)

    def _save(self, eval_loss: float | None, best: bool) -> None:
        trainer = self._trainer
        started = time.perf_counter()
        trainer.counter.phase = "save"
        snapshot = take_snapshot(trainer)
        if trainer.mesh.rank != 0:
            snapshot.drain()
            return
        try:
            path = save(trainer, snapshot, eval_loss)
            if best:
                mark_best(path.parent, path)
            rotate(path.parent, trainer.job.checkpoint.keep_last, path)
        except OSError as error:  # a full disk costs a checkpoint, not the run
            snapshot.drain()
            trainer.events.write("checkpoint_failed", step=trainer.step, reason=str(error))
            return
        seconds = time.perf_counter() - started
        trainer.events.write(
            "checkpoint", step=trainer.step, path=str(path), bytes=folder_bytes(path), seconds=seconds
        )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
