"""The trainer of one rank: model, optimizer and data, and what one step does with them.

``build.build_trainer`` builds it, ``loop.train`` calls it. A step is ``train_step``: get the batch, compute
(``forward_backward`` with gradient accumulation, the control all-reduce, ``update`` with gradient clipping),
count the step, write its event. ``layout.lr_schedule`` has the learning rate schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import TrainState
from meshwright.data.corpus_file import write_corpus
from meshwright.data.growth import describe_growth
from meshwright.data.mixture import count_by_source
from meshwright.layout.lr_schedule import lr_at
from meshwright.measure.link_time import LinkMeter
from meshwright.measure.step_observer import StepObserver
from meshwright.models.decoder import Decoder
from meshwright.parallel.backup_replicas import BackupReplicas
from meshwright.parallel.batch import Batch
from meshwright.parallel.data_parallel import gradient_sync
from meshwright.parallel.ddp import sync_batch_norm_stats
from meshwright.spec.job import Job
from meshwright.train.amp import MixedPrecision
from meshwright.train.bad_steps import describe_bad_step, is_bad, keep_norm, spike_limit
from meshwright.train.batches import SliceReader
from meshwright.train.data import TrainData
from meshwright.train.expert_balance import ExpertBalancer, is_load_report_due
from meshwright.train.follow import Votes, build_follower
from meshwright.train.gradient_noise import NoiseScale, add_noise
from meshwright.train.optimizer import set_lr, updates_weight_copies
from meshwright.train.optimizer_offload import OffloadedOptimizerState
from meshwright.train.parallel_model import ParallelModel
from meshwright.train.rank_context import RankContext
from meshwright.train.step_control import StepControl
from meshwright.train.step_result import StepResult
from meshwright.train.stop_signal import StopSignal
from meshwright.train.throughput import ThroughputMeter


class StepHooks:
    """Hooks of a step, for fault injection and probes: a subclass overrides what it needs."""

    def before_forward_backward(self, trainer: Trainer, observer: StepObserver | None) -> None:
        """Before the first forward pass of a step, and of a bad step that is recomputed to find its cause.

        Args:
            trainer: The trainer that runs the step.
            observer: Observes this step.
        """

    def before_update(self, trainer: Trainer) -> None:
        """Before the gradients of the step are clipped and applied."""

    def after_update(self, trainer: Trainer, grad_norm: Tensor) -> None:
        """After the optimizer step.

        Args:
            trainer: The trainer that runs the step.
            grad_norm: Norm of the whole gradient; not finite if the update was skipped.
        """


class Trainer:
    """Model, optimizer and data of one rank."""

    def __init__(
        self,
        context: RankContext,
        parallel_model: ParallelModel,
        amp: MixedPrecision,
        optimizer: Optimizer,
        offloaded_state: OffloadedOptimizerState | None,
        balancer: ExpertBalancer | None,
        data: TrainData,
        state: TrainState,
        saver: CheckpointSaver,
        stop: StopSignal,
    ) -> None:
        """Put the parts together.

        Args:
            context: Plan, mesh and reporting of this rank.
            parallel_model: Model with all axes applied.
            amp: Mixed precision.
            optimizer: Optimizer of the parameters that this rank updates.
            offloaded_state: Its state, if that is in CPU memory.
            balancer: Balancer of experts, if there are some.
            data: To train and evaluate on.
            state: Counters; restored if the run is resumed.
            saver: Saver of checkpoints.
            stop: Set when this rank is asked to stop.
        """
        self.plan, self.assignment, self.mesh = context.plan, context.assignment, context.mesh
        self.counter, self.events = context.counter, context.events
        self.flight_recorder = context.counter.flight
        self.setup, self.has_snapshot_slots = context.setup, context.snapshot_slots is not None
        self.model, self.module, self.parallel, self.weight_copies = parallel_model.applied
        self.pipeline, self.reducer = parallel_model.pipeline, parallel_model.reducer
        self.backup, self.rank_parameters = parallel_model.backup, parallel_model.rank_parameters
        self.amp, self.optimizer, self.balancer = amp, optimizer, balancer
        self.offloaded_state = offloaded_state
        self.data, self.state, self.saver, self.stop = data, state, saver, stop
        self.follower = build_follower(self.job, Path(self.assignment.data_dir), data.corpus, self.mesh)
        self.noise_scale = NoiseScale(self.module, self.job.train.noise_scale_every)
        buffers = self.model.buffers() if self.job.mixes_samples else ()
        self._batch_norm_stats = [(buffer, buffer.clone()) for buffer in buffers]
        """Running statistics of batch norms, and their values before the step: a bad step keeps them."""
        self.link_meter = LinkMeter() if self.job.cluster.nodes > 1 else None
        """Meter of the connections to other hosts."""
        self.observer: StepObserver | None = None
        """Observes the running step, if it is audited or proved; a report of an error reads from it."""
        self._hooks: list[StepHooks] = []

    @property
    def job(self) -> Job:
        """The settled job."""
        return self.plan.job

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.state.step

    def register_hooks(self, hooks: StepHooks) -> None:
        """Call these hooks in every step from now on."""
        self._hooks.append(hooks)

    def replace_data(self, data: TrainData) -> None:
        """Read the batches of the next steps from other data."""
        self.data = data

    def train_step(
        self, meter: ThroughputMeter, observer: StepObserver | None = None, overlap_next_step: bool = False
    ) -> StepResult:
        """Run one optimizer step and write its event.

        The step time ends when the loss is known. If the loss is read before the optimizer step has finished,
        the time of this step excludes its optimizer step and the time of the next step includes it.

        Args:
            meter: Computes tokens/s and MFU.
            observer: Observes the step.
            overlap_next_step: Whether another step follows at once.
        """
        started = time.perf_counter()
        self.flight_recorder.enter("waiting for data", self.step + 1)
        _, samples, targets, micro_batches = self.data.prefetcher.get(self.state.position)

        def prefetch() -> None:
            if self.step + 1 < self.job.train.steps:
                self.data.prefetcher.prefetch(self.state.position + len(samples))

        result = self.compute_step(micro_batches, targets, observer, prefetch, overlap_next_step)
        count, bad = result.target_count, result.bad
        assert count == targets, f"{count:.0f} targets were trained on, {targets} were expected"
        self.state.advance(len(samples))
        if bad is None and math.isfinite(result.grad_norm):  # else fp16 overflowed
            self.state.grad_norms = keep_norm(self.state.grad_norms, result.grad_norm)
        # Without targets the mean is undefined, and not zero.
        loss = result.loss_sum / targets if targets else None
        step_s = time.perf_counter() - started
        self.events.write(
            "step",
            step=self.step,
            loss=loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            noise_scale=None if bad else self._estimate_noise_scale(result, len(samples)),
            tokens=targets,
            step_s=step_s,
            **meter.read(targets / step_s),
            **self.amp.step_fields(result.grad_norm, bad is not None),
            bad_step=None if bad is None else bad.kind,
            spent_s=self.flight_recorder.own_time.take(),
            **({} if self.link_meter is None else {"links": self.link_meter.take()}),
            **({} if self.backup is None else {"slice": self.backup.used_slice}),
            **({} if result.expert_load is None else result.expert_load.step_fields()),
        )
        report_load = self.mesh.rank == 0 and is_load_report_due(self.step, self.job.train.steps)
        if result.expert_load is not None and report_load:
            self.events.write("experts", step=self.step, layers=result.expert_load.layer_rows())
        self.amp.check_loss_scale(self.step, self.saver.has_checkpoint)
        return result

    def compute_step(
        self,
        micro_batches: Iterable[Batch],
        targets: int,
        observer: StepObserver | None = None,
        prefetch: Callable[[], None] = lambda: None,
        overlap_next_step: bool = False,
    ) -> StepResult:
        """Everything that a step computes and sends: gradients, the update, the control all-reduce.

        Args:
            micro_batches: Those of this rank.
            targets: Target tokens of all ranks.
            observer: Observes the step.
            prefetch: Called when all work of the step is queued, before the CPU waits for the device.
            overlap_next_step: Whether another step follows at once. Then the update may still run on the
                device when this returns.
        """
        self.counter.phase, self.observer = "step", observer
        for buffer, before in self._batch_norm_stats:
            before.copy_(buffer)
        self.noise_scale.begin(self.step + 1)
        divisor = max(targets, 1)  # a batch of long masked prompts has no target, and no gradient
        local_loss, local_targets = self.forward_backward(micro_batches, divisor, observer)
        if observer is not None:
            observer.after_backward()
        noise = self.noise_scale.parts(divisor, local_targets)
        loss_scale = self.amp.loss_scale() if noise else 1.0
        lr = lr_at(self.step, self.job.train)
        read_loss_early = overlap_next_step and self.can_read_loss_early()
        control: list[StepControl] = []

        def find_bad_step(grad_norm: Tensor) -> Tensor:
            self.flight_recorder.enter("control all-reduce")
            control.append(self._start_control_all_reduce(local_loss, local_targets, noise, grad_norm))
            if read_loss_early:
                control[0].start_copy()
            self.flight_recorder.enter("update")
            return control[0].is_bad

        self.update(lr, find_bad_step)
        sync_batch_norm_stats(self.model, self.job, self.mesh)
        prefetch()
        self.flight_recorder.enter("control all-reduce")
        # The first read of a device value in this step: all its work is queued by now.
        sums = control[0].wait()
        bad = None
        if sums.bad_ranks:
            bad = describe_bad_step(sums.loss, sums.grad_norm, self.state.grad_norms, self.step + 1)
        load = None if self.balancer is None else self.balancer.end_step(self.mesh, update_biases=bad is None)
        if bad is not None:
            self.restore_forward_state()
        return StepResult(
            loss_sum=sums.loss,
            target_count=sums.targets,
            stop_requested=sums.stop_requests > 0,
            save_requested=sums.save_requests > 0,
            noise_sums=sums.noise,
            loss_scale=loss_scale,
            lr=lr,
            grad_norm=sums.grad_norm,
            bad=bad,
            expert_load=load,
            data_votes=sums.data_votes,
        )

    def follow_data(self, votes: Votes) -> None:
        """Go on with grown data if all ranks have opened them; at the end of a step.

        Args:
            votes: Votes of all ranks in this step.
        """
        grown = None if self.follower is None else self.follower.after_step(votes)
        if grown is None:
            return
        counters, state = self.state, self.saver.state
        weights = {source.name: source.weight for source in self.job.data.sources}
        positions = count_by_source(weights, counters.position)
        before, state.corpus = state.corpus, state.corpus.grown(grown, positions)
        counters.corpus = write_corpus(Path(self.assignment.run_dir), state.corpus)
        self.replace_data(self.data.reopened(state.corpus))
        if self.mesh.rank == 0:
            notes = describe_growth(before.sources, grown.sources, state.corpus.epochs)
            self.events.write("data_grew", step=self.step, position=counters.position, notes=notes)

    def raise_changed_data(self) -> None:
        """Raise the error of followed data that changed, on the rank that found it.

        It is called after the last checkpoint was saved.

        Raises:
            UserError: The data changed.
        """
        if self.follower is not None and self.follower.refused is not None:
            raise self.follower.refused

    def restore_forward_state(self) -> None:
        """Undo what forward passes of a bad step changed: batch norm statistics, counts of expert load."""
        for buffer, before in self._batch_norm_stats:
            buffer.copy_(before)
        if self.balancer is not None:
            self.balancer.sums.zero_()

    def can_read_loss_early(self) -> bool:
        """Whether the loss can be read back before the optimizer step has finished.

        On one GPU the CPU then reports the step and queues the next one while the optimizer step runs, so the
        GPU never waits for the CPU. With several ranks the time of a step includes its optimizer step.
        Offloaded state needs the CPU for the update.
        """
        return self.mesh.device.type == "cuda" and self.mesh.control is None and self.offloaded_state is None

    def _start_control_all_reduce(
        self,
        local_loss: Tensor,
        local_targets: int,
        noise: Sequence[Tensor | float],
        grad_norm: Tensor,
    ) -> StepControl:
        """Sum loss, targets and flags over all ranks; the gradient norm is read back beside them."""
        limit = spike_limit(self.state.grad_norms, self.job.train.spike_factor)
        refused = self.follower is not None and self.follower.refused is not None
        save_due = None
        if self.saver.sends_save_request:
            save_due = self.mesh.rank == 0 and self.saver.is_due_by_time()
        votes = None
        if self.job.data.follow:
            votes = Votes() if self.follower is None else self.follower.vote()
        reports = self.mesh.reports_loss
        return StepControl.start(
            self.mesh,
            loss=local_loss if reports else 0.0,
            targets=local_targets if reports else 0.0,
            bad=is_bad(local_loss, grad_norm, limit, self.amp.is_scaled),
            stop=self.stop.requested or refused,
            save_due=save_due,
            data_votes=votes,
            noise=noise,
            grad_norm=grad_norm,
        )

    def forward_backward(
        self, batches: Iterable[Batch], divisor: int, observer: StepObserver | None = None
    ) -> tuple[Tensor, int]:
        """Accumulate the gradients of one step.

        Args:
            batches: The micro-batches of this rank.
            divisor: Divisor of the loss: target tokens of all ranks.
            observer: Observes the passes.

        Returns:
            The summed loss of this rank, and its number of targets.
        """
        for hooks in self._hooks:
            hooks.before_forward_backward(self, observer)
        if self.pipeline is not None:
            read = self.flight_recorder.read_data(batches, "forward and backward")
            found = self.pipeline.train(read, divisor, observer)
            self.rank_parameters.finalize_grads()
            return found
        if self.backup is not None:
            return self._compute_slices(self.backup, batches, divisor, observer)
        found = self._accumulate(batches, divisor, observer)
        if self.reducer is not None:
            self.reducer.finish()
        self.rank_parameters.finalize_grads()
        return found

    def _compute_slices(
        self, backup: BackupReplicas, batches: Iterable[Batch], divisor: int, observer: StepObserver | None
    ) -> tuple[Tensor, int]:
        """The gradients of a step with backup replicas. The loss of a slice counts on one replica."""
        found: list[tuple[Tensor, int]] = []

        def accumulate(index: int) -> None:
            read = batches.read(index) if isinstance(batches, SliceReader) else batches
            found.append(self._accumulate(read, divisor, observer))

        audited = observer is not None or self.counter.phase != "step"
        backup.compute(accumulate, audited)
        self.rank_parameters.finalize_grads()
        none = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return (none, 0) if backup.used_slice is None else found[-1]

    def _accumulate(
        self, batches: Iterable[Batch], divisor: int, observer: StepObserver | None
    ) -> tuple[Tensor, int]:
        """Gradient accumulation over micro-batches; returns the summed loss and the number of targets."""
        device = self.mesh.device
        if isinstance(self.model, Decoder):
            self.model.set_expected_loss_grad(1 / divisor)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        targets_seen = 0
        for index, batch in enumerate(self.flight_recorder.read_data(batches, "forward", "backward")):
            last = index == self.plan.micro_batches - 1
            if observer is not None:
                observer.before_forward(index)
            with gradient_sync(self.module, self.job, last=last):
                with self.amp.autocast():
                    loss = self.module(*batch.to_device(device))
                if observer is not None:
                    observer.after_forward()
                    observer.before_backward(index)
                if self.reducer is not None:
                    self.reducer.begin(last=last)
                self.flight_recorder.enter("backward")
                self.amp.backward(loss / divisor)
            targets_seen += int((batch.targets >= 0).sum())  # while the device computes
            self.noise_scale.after_micro_batch(targets_seen)
            loss_sum += loss.detach()
        return loss_sum, targets_seen

    def update(self, lr: float, find_bad_step: Callable[[Tensor], Tensor]) -> Tensor:
        """Clip the gradients, step the optimizer, zero the gradients.

        Args:
            lr: Learning rate of this step.
            find_bad_step: Called with the gradient norm before any parameter changes; returns whether the
                step is bad, on the device.

        Returns:
            The gradient norm of the whole model; NaN in a bad step. If it is not finite, nothing changed.
        """
        for hooks in self._hooks:
            hooks.before_update(self)
        rank_parameters = self.rank_parameters
        self.flight_recorder.enter("update")
        rank_parameters.assign_shard_grads()
        grad_norm = self.amp.unscale_gradients(rank_parameters, self.optimizer)
        bad = find_bad_step(grad_norm).to(grad_norm.device)
        grad_norm = grad_norm.masked_fill(bad, math.nan)
        self.amp.clip_gradients(rank_parameters, self.optimizer, self.job.train.clip, grad_norm)
        add_noise(rank_parameters, self.job.train, self.step)
        set_lr(self.optimizer, lr)
        self.amp.step(self.optimizer, grad_norm, bad)
        rank_parameters.all_gather_parameters()
        rank_parameters.zero_grads()
        if self.weight_copies is not None:
            self.weight_copies.is_stale = not updates_weight_copies(self.optimizer)
        for hooks in self._hooks:
            hooks.after_update(self, grad_norm)
        return grad_norm

    def _estimate_noise_scale(self, result: StepResult, samples: int) -> float | None:
        return self.noise_scale.estimate(result.noise_sums, samples, result.loss_scale)
