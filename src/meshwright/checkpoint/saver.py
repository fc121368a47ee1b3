"""Decides when a checkpoint is saved; a thread writes it while training goes on.

Every rank writes its part of the state from staging memory (``staging``); rank 0 commits the checkpoint
(``writer``, ``drafts``). At most one checkpoint is in flight: the next save waits for it.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict

import torch

from meshwright.checkpoint.divergence import non_finite_error
from meshwright.checkpoint.draft import DraftError
from meshwright.checkpoint.drafts import new_draft, remove_older_drafts
from meshwright.checkpoint.manifest import (
    Manifest,
    beats_best,
    describe_sharding,
    mark_best,
    read_manifest,
    rotate,
)
from meshwright.checkpoint.replicated_write import ReplicatedWrite
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.save_cost import AutoInterval, StepTimes
from meshwright.checkpoint.staging import StagingBuffer, describe_tensors, list_write_items
from meshwright.checkpoint.state import CheckpointedState
from meshwright.checkpoint.state_snapshots import StateSnapshots
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.checkpoint.tensor_files import WriteItem
from meshwright.checkpoint.writer import CheckpointWrite, WeightNotFiniteError
from meshwright.core.errors import UserError
from meshwright.core.events import Commit, EventWriter
from meshwright.core.object_path import AnyPath
from meshwright.data.mixture import count_by_source
from meshwright.launch.fence import FencedError, HaltedError
from meshwright.layout.checkpoint_interval import SaveCost, failure_rate
from meshwright.plan.contract import PlanContract
from meshwright.spec.train_defaults import fill_defaults


class CheckpointSaver:
    """Saves by steps, by time, on the best evaluation, and at the end. All ranks save at the same steps."""

    def __init__(
        self,
        stores: CheckpointStores,
        state: CheckpointedState,
        rank: int,
        events: EventWriter,
        snapshots: StateSnapshots | None = None,
        commit: Commit = nullcontext,
        attempt: int = 0,
    ) -> None:
        """Commit or remove what an earlier generation left half-written.

        Args:
            stores: Where the checkpoints are kept.
            state: To save.
            rank: Rank of this process.
            events: To report saves.
            snapshots: In memory, taken beside checkpoints.
            commit: Entered when a checkpoint gets its name; raises where this rank must write no more.
            attempt: When the attempt of the run began, in milliseconds.
        """
        self._commit, self._attempt = commit, attempt
        self._stores, self.state, self._rank, self._events = stores, state, rank, events
        self._snapshots = snapshots
        self._settings = state.plan.job.checkpoint
        self._retention = Retention(self._settings.keep_last, self._settings.keep_every)
        device = next(iter(state.sharded.local_parameters())).device
        host = state.plan.host_memory
        is_staged = self._settings.asynchronous and not (host is not None and host.staging_off)
        self._staging = StagingBuffer(device) if is_staged else None
        self._in_flight: ReplicatedWrite | None = None
        self._blocked_s = self._waited_s = 0.0
        self._step_times, self._auto = StepTimes(), _build_auto_interval(state.plan)
        self.saved_step = -1
        """Steps done when the last save began."""
        self._saved_at = time.monotonic()
        if rank == 0:
            stores.finish_drafts(commit)
            self._saved_at -= self._measure_age()

    def _measure_age(self) -> float:
        """Seconds since the last save of earlier generations, or since the attempt began; 0 if not known."""
        if not self._attempt:
            return 0.0
        saved = [self._attempt / 1000]
        for path in self._stores.list_paths()[-1:]:
            with suppress(UserError, OSError):
                saved.append(read_manifest(path, verify=False).saved_at)
        return min(max(0.0, time.time() - max(saved)), 60 * self._settings.every_minutes)

    @property
    def sends_save_request(self) -> bool:
        """Whether the control all-reduce carries rank 0's decision that a save is due by time."""
        return self.state.plan.world_size > 1

    @property
    def snapshot_bytes(self) -> int:
        """CPU memory that in-memory snapshots of this rank take."""
        return 0 if self._snapshots is None else self._snapshots.reserved_bytes

    def is_due_by_time(self) -> bool:
        """Whether ``checkpoint.every_minutes``, or the interval of ``auto``, are over since the last save."""
        since_s = time.monotonic() - self._saved_at
        if self._auto is not None:
            return self._auto.is_due(since_s, self.saved_step >= 0, self._step_times.counted)
        return 0 < self._settings.every_minutes <= since_s / 60

    def is_due_at(self, step: int) -> bool:
        """Whether a save is due after a step by ``checkpoint.every_steps``."""
        return self._settings.every_steps > 0 and step % self._settings.every_steps == 0

    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from; reads the stores: only rank 0 records saves."""
        return self._stores.has_checkpoints() is not None

    def save_now(self) -> None:
        """Save a checkpoint of the current state, and wait until it is committed."""
        self._save(None)
        self._collect(wait=True)

    def after_step(
        self, last: bool, eval_loss: float | None, save_requested: bool, step_s: float | None = None
    ) -> None:
        """Save a checkpoint and take a snapshot, if they are due.

        Args:
            last: Whether the run ends with this step; then the checkpoint is committed on return.
            eval_loss: Held-out loss of this step, if it was evaluated.
            save_requested: With several ranks: whether rank 0 found a save due by time.
            step_s: Time of this step; None if it is not typical.
        """
        if step_s is not None:
            self._step_times.add(step_s, during_write=self._in_flight is not None)
        self._collect(wait=False)
        counters = self.state.counters
        timely = save_requested if self.sends_save_request else self.is_due_by_time()
        best = self._settings.on_best and eval_loss is not None and eval_loss < counters.best_eval_loss
        if eval_loss is not None:
            counters.best_eval_loss = min(eval_loss, counters.best_eval_loss)
        if last or best or timely or self.is_due_at(counters.step):
            self.saved_step = counters.step
            self._save(eval_loss)
            if last or self._staging is None:
                self._collect(wait=True)
            self._saved_at = time.monotonic()
        if self._snapshots is not None and not last:
            self._snapshots.after_step()

    def close(self) -> None:
        """End the thread of a generation that failed. The next one finishes its draft."""
        if self._in_flight is not None:
            self._in_flight.cancel()
            self._in_flight = None

    def _save(self, eval_loss: float | None) -> None:
        """Copy the state and start to write it."""
        waited_s = self._wait_for_previous()
        started = time.perf_counter()
        items = self._list_items()
        if self._staging is not None:
            items = self._staging.copy(items)
        manifest = self._build_manifest(eval_loss) if self._rank == 0 else None
        writes = [self._prepare_write(root, items, manifest) for root in self._stores.roots]
        write = ReplicatedWrite(writes, self._stores.quorum)
        write.start()
        self._in_flight, self._waited_s = write, waited_s
        self._blocked_s = time.perf_counter() - started + waited_s

    def _list_items(self) -> list[WriteItem]:
        """The tensors that this rank writes."""
        return list_write_items(self.state, self._rank)

    def _build_manifest(self, eval_loss: float | None) -> Manifest:
        return build_manifest(self.state, eval_loss)

    def _prepare_write(
        self, root: AnyPath, items: list[WriteItem], manifest: Manifest | None
    ) -> CheckpointWrite:
        """The write into one store; after its commit older checkpoints there are removed."""
        draft = new_draft(root, self.state.counters.step, self._events.generation, self._attempt)

        def mark_and_rotate(path: AnyPath) -> None:
            with self._commit():  # raises where another process has this rank
                is_best = self._settings.on_best and manifest and beats_best(root, manifest.eval_loss)
                try:
                    if is_best:
                        mark_best(root, path)
                except OSError:  # a full disk; rotation gives room
                    rotate(root, self._retention, path)
                    mark_best(root, path)
            remove_older_drafts(draft)
            rotate(root, self._retention, path)

        write = CheckpointWrite(draft, self._rank, items, guard=self._commit, on_commit=mark_and_rotate)
        if manifest is not None:
            write.manifest, write.small_files = manifest, self.state.small_files
        return write

    def _wait_for_previous(self) -> float:
        """Wait for the checkpoint in flight, if there is one, and report the wait; returns its seconds."""
        previous, started = self._in_flight, time.perf_counter()
        if previous is None:
            return 0.0
        previous.wait()
        waited_s, step = time.perf_counter() - started, self.state.counters.step
        self._collect(wait=False)
        if self._rank == 0:
            self._events.write("checkpoint_waited", step=step, previous_step=previous.step, waited_s=waited_s)
        return waited_s

    def _collect(self, wait: bool) -> None:
        """Report the checkpoint in flight, if it is committed or has failed.

        Args:
            wait: Wait for it; training is blocked.

        Raises:
            NotFiniteError: A weight has a NaN or an Inf.
        """
        write = self._in_flight
        if write is None or not (wait or write.is_done()):
            return
        started = time.perf_counter()
        write.wait()
        if wait:
            self._blocked_s += time.perf_counter() - started
        slowdown = self._step_times.end_write()
        self._in_flight, step, error = None, write.step, write.error
        if isinstance(error, WeightNotFiniteError):
            raise non_finite_error(f"weight {error.name}", math.nan, step, self.has_checkpoint())
        if error is not None and not isinstance(error, OSError | FencedError | HaltedError):
            raise error
        if self._rank != 0:
            return
        if write.path is None:  # a full disk costs a checkpoint, not the run
            reason = str(error) if isinstance(error, DraftError) else f"rank 0: {error}"
            self._events.write("checkpoint_failed", step=step, reason=reason)
            return
        self._events.write(
            "checkpoint",
            step=step,
            path=str(write.path),
            bytes=write.bytes,
            copies=[str(copy) for copy in write.copies],
            seconds=write.seconds,
            blocked_s=self._blocked_s,
            waited_s=self._waited_s,
            slowdown=slowdown.factor,
            slowed_s=slowdown.seconds,
        )
        for store, reason in write.failures.items():
            self._events.write("checkpoint_copy_failed", step=step, store=store, reason=reason)
        if self._auto is None or (
            wait and self._staging is not None
        ):  # training does not go on: the last one
            return
        cost = SaveCost(self._blocked_s - self._waited_s, slowdown.seconds, write.seconds)
        if (choice := self._auto.measure(cost)) is not None:
            cost = choice.cost
            facts = asdict(cost) | {"cost_s": cost.cost_s, "between_failures_s": choice.failures.mtbf_s}
            reason = choice.sentence()
            self._events.write("checkpoint_interval", interval_s=choice.interval_s, reason=reason, **facts)


def _build_auto_interval(plan: PlanContract) -> AutoInterval | None:
    """The interval of ``checkpoint.auto``; None without it."""
    if not plan.job.checkpoint.auto:
        return None
    return AutoInterval(failure_rate(plan.job.cluster, plan.world_size))


def build_manifest(state: CheckpointedState, eval_loss: float | None) -> Manifest:
    """The manifest of a checkpoint of the current step, before its files are written."""
    plan, job, counters = state.plan, state.plan.job, state.counters
    weights = {source.name: source.weight for source in job.data.sources}
    return Manifest(
        step=counters.step,
        saved_at=time.time(),
        position=counters.position,
        world_size=plan.world_size,
        model=asdict(job.model),
        train=fill_defaults(job.train),
        seq_len=job.data.seq_len,
        mask=job.data.mask,
        prompt_masking=job.data.prompt_masking,
        data_sha256=state.corpus.sha256,
        data=state.corpus.sources,
        epochs=state.corpus.epochs,
        template=state.template,
        eval_fraction=job.data.eval_fraction,
        sources=weights,
        source_positions=count_by_source(weights, counters.position) if weights else {},
        buckets=[list(names) for names in plan.buckets],
        micro_batch=job.layout.micro_batch or 0,
        compression=job.compression.kind,
        sharding=describe_sharding(job),
        transport=state.transport,
        tensors=describe_tensors(state),
        torch=torch.__version__,
        loss_scale=state.loss_scaler.state_dict(),
        grad_norms=list(counters.grad_norms),
        eval_loss=eval_loss,
        best_eval_loss=None if math.isinf(counters.best_eval_loss) else counters.best_eval_loss,
    )
