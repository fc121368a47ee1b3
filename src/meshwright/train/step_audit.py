"""Measures the memory of one step: state, activations kept for the backward pass, and peak."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.layout.optimizer_offload import OFFLOADED
from meshwright.measure.allocation_profile import AllocationProfile
from meshwright.measure.memory_tracker import PeakTracker, state_bytes, unique_bytes
from meshwright.models.moe import Experts
from meshwright.parallel.ddp import FixedBucketDDP
from meshwright.spec.execution import uses_eager_blocks
from meshwright.train.optimizer_offload import offloaded_bytes
from meshwright.train.trainer import Trainer


class ExpertRowCounter:
    """Counts the rows that the experts of this rank read in each layer; their activations depend on it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, Experts)]
        self._found: list[list[int]] = [[] for _ in self._layers]

    def begin(self) -> None:
        """A forward pass begins: drop the counts that a recomputation in the backward pass may have left."""
        for layer in self._layers:
            layer.rows_read = None

    def end(self) -> None:
        """The forward pass has ended: keep the counts of the layers that it ran."""
        for layer, found in zip(self._layers, self._found, strict=True):
            if layer.rows_read is not None:
                found.append(layer.rows_read)

    def summary(self) -> dict[str, list[int]] | None:
        """Rows by layer: in the micro-batch with most rows, and on average; None without experts."""
        if not self._layers:
            return None
        by_micro_batch = list(zip(*self._found, strict=True))
        mean = [round(sum(rows) / len(rows)) for rows in self._found]
        return {"fullest": list(max(by_micro_batch, key=sum)), "mean": mean}


class StepAudit:
    """Measures a step from its start until before the update; a context around the step.

    On a CPU a dispatch mode tracks every operation, which slows down this step. Inside compiled code it sees
    nothing: there torch's memory profiler records the allocations. On a GPU the allocator's statistics are
    used.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.mesh.device
        gradients = trainer.rank_parameters.local_grads()
        state = {
            "parameters": trainer.rank_parameters.local_parameters(),
            "gradients": gradients,
            "optimizer": [v for values in trainer.optimizer.state.values() for v in values.values()],
        }
        offloaded = OFFLOADED[trainer.job.layout.offload]
        alive = [tensor for kind, tensors in state.items() if kind not in offloaded for tensor in tensors]
        alive += trainer.model.buffers()
        alive += trainer.offloaded_state.staging if trainer.offloaded_state else ()
        alive += [trainer.backup.buffers] if trainer.backup else []
        alive += trainer.module.buffers_of_hook if isinstance(trainer.module, FixedBucketDDP) else ()
        alive += trainer.weight_copies.copies.values() if trainer.weight_copies else ()
        self._compiled = not uses_eager_blocks(trainer.job)
        self._on_gpu = self._device.type == "cuda"
        self._tracker: PeakTracker | None = None
        self._profile: AllocationProfile | None = None
        self._unseen_bytes = 0
        if not self._on_gpu:
            self._unseen_bytes = 0 if gradients else _count_bucket_bytes(trainer.module)
            if self._compiled:
                self._profile = AllocationProfile()
                self._unseen_bytes += unique_bytes(alive)
            else:
                self._tracker = PeakTracker(alive, trainer.rank_parameters.list_all_gather_outputs)
        self._before_forward = 0
        self._kept: list[int] = []
        """Saved bytes by forward pass; with an allocation profile, corrections of its figures."""
        self._rows = ExpertRowCounter(trainer.model)
        self._memory_measurement = trainer.flight_recorder.measuring_memory()

    def __enter__(self) -> StepAudit:
        self._memory_measurement.__enter__()
        if self._tracker is not None:
            self._tracker.__enter__()
        elif self._profile is not None:
            self._profile.start()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(kind, error, trace)
        elif self._profile is not None:
            self._profile.stop()
        self._memory_measurement.__exit__(kind, error, trace)

    def before_forward(self, micro_batch: int) -> None:
        """A forward pass begins."""
        self._rows.begin()
        self._before_forward = self._ungathered_bytes()

    def after_forward(self, border_bytes: int = 0) -> None:
        """Tensors allocated in the forward pass that are still alive are kept for the backward pass."""
        self._kept.append(self._ungathered_bytes() - self._before_forward + border_bytes)
        self._rows.end()

    def before_backward(self, micro_batch: int) -> None:
        """Nothing to do: the peak is tracked all the time."""

    def after_backward(self) -> None:
        """Write the ``state`` event: the state is defined at this point of the step."""
        trainer = self._trainer
        activations, peak = self._read_peak()
        trainer.events.write(
            "state",
            step=trainer.step,
            state_bytes=state_bytes(trainer.rank_parameters, trainer.optimizer),
            offloaded_bytes=offloaded_bytes(
                trainer.rank_parameters, trainer.optimizer, trainer.offloaded_state, trainer.job, self._device
            ),
            activation_bytes=activations,
            peak_bytes=peak,
            snapshot_bytes=trainer.saver.snapshot_bytes if trainer.has_snapshot_slots else None,
            routed_rows=self._rows.summary(),
            compiled=self._compiled,
            first_step=trainer.step == trainer.state.first_step,
        )

    def _read_peak(self) -> tuple[int, int]:
        """The most that a forward pass kept, and the peak so far."""
        if self._profile is not None:
            self._profile.stop()
            allocated = self._profile.between_marks()
            kept = max(found + more for found, more in zip(allocated, self._kept, strict=True))
            return kept, self._unseen_bytes + self._profile.peak_bytes
        if self._tracker is not None:
            return max(self._kept), self._unseen_bytes + self._tracker.peak_bytes
        return max(self._kept), torch.cuda.max_memory_allocated(self._device)

    def live_bytes(self) -> int | None:
        """Bytes of all live tensors; None where compiled code hides them."""
        if self._tracker is not None:
            return self._tracker.live_bytes
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else None

    def _ungathered_bytes(self) -> int:
        """The same without all-gathered parameters; with a profile, which is read later, only these."""
        if self._tracker is not None:
            return self._tracker.live_bytes - self._tracker.gathered_bytes
        if self._profile is not None:
            self._profile.mark()
        tensors = self._trainer.rank_parameters.list_all_gather_outputs()
        return (self.live_bytes() or 0) - sum(tensor.untyped_storage().size() for tensor in tensors)


def _count_bucket_bytes(module: nn.Module) -> int:
    """Bytes of DDP's gradient buckets: allocated at construction, they become visible in the first step."""
    if not isinstance(module, DistributedDataParallel):
        return 0
    return sum(bucket.buffer().nbytes for bucket in module.reducer._get_zeros_like_grad_buckets())
