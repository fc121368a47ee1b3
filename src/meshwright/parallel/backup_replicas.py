"""Backup replicas: slices of the batch are computed twice, and a step uses the first gradient of each slice.

With ``layout.backup_replicas = b``, the samples of a step are split into ``dp_replicate - b`` slices. Replica
i computes slice i. The last b replicas are backups: each computes the slice of a replica that was slow in the
steps before. A replica abandons its slice when another replica has finished it. So a step takes the
first k of n gradients, and a slow replica does not delay it.

1. A replica that finishes a slice notes it in the store (``FinishedSlices``). The first one holds the slice.
2. It joins an all-gather of claims: which slice it holds, and how long that took. The others join when every
   slice is finished.
3. Buckets of gradients are exchanged by all-to-all, summed in the order of the slices, and all-gathered. A
   replica without a slice sends zeros, which are not added.

The sum does not depend on who computed a slice. So losses are the same bits in every run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.layout.backup_replicas import padded_size
from meshwright.parallel.collectives import all_gather_into

POLL_S = 0.01
"""Shortest time between two queries of the store while a slice is computed."""
STORE_BACKOFF_S = 10.0
"""Time without queries after the store did not answer."""
SMOOTHING = 0.3
"""Weight of the last step in the relative time of a slice."""
FADING = 0.99
"""Decay of the relative time of a slice that its own replica did not finish."""


class SliceStore(Protocol):
    """The part of ``torch.distributed.Store`` that finished slices are kept in."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to an integer; returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key."""


class SliceTakenError(Exception):
    """Every slice of the step is finished: the computation of this replica is not needed."""


class FinishedSlices:
    """The finished slices of a step, in a store that all replicas see.

    It only saves time. If the store does not answer, every replica finishes its slice.
    """

    def __init__(self, store: SliceStore, slices: int) -> None:
        """Use a store.

        Args:
            store: For small values; its keys are those of one generation.
            slices: Slices of a step.
        """
        self._store, self._slices = store, slices
        self._step, self._queried_at, self._retry_at = 0, 0.0, 0.0
        self._own: list[str] = []

    def begin(self, step: int) -> None:
        """Start a step. Its number is the same on all replicas."""
        for key in self._own:  # of the previous step, which all replicas have left
            self._query(partial(self._store.delete_key, key), default=True)
        self._step, self._own = step, []

    def add(self, index: int) -> bool:
        """Note that a slice is finished; returns whether this replica is the first."""
        key = self._key(index)
        self._own.append(key)
        return self._query(lambda: self._store.add(key, 1) == 1, default=True)

    def is_finished(self, index: int) -> bool:
        """Whether a slice is finished."""
        return self._query(lambda: self._store.check([self._key(index)]), default=False)

    def are_all_finished(self) -> bool:
        """Whether all slices are finished; queries the store at most once in ``POLL_S``."""
        if time.monotonic() < self._queried_at + POLL_S:
            return False
        self._queried_at = time.monotonic()
        keys = [self._key(index) for index in range(self._slices)]
        return self._query(lambda: self._store.check(keys), default=False)

    def _key(self, index: int) -> str:
        return f"slice/{self._step}/{index}"

    def _query(self, call: Callable[[], bool], default: bool) -> bool:
        if time.monotonic() < self._retry_at:
            return default
        try:
            return call()
        except dist.DistStoreError:
            self._retry_at = time.monotonic() + STORE_BACKOFF_S
            return default


@dataclass
class _Bucket:
    """Gradients that are exchanged together."""

    flat: Tensor

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> _Bucket:
        """Make the gradients of some parameters views of one tensor."""
        flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        for parameter, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)
        return cls(flat)


class BackupReplicas:
    """The replicas of one model: chooses slices, abandons late ones, and sums the gradients."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Sequence[str]],
        group: dist.ProcessGroup,
        slices: int,
        finished_slices: FinishedSlices | None,
        interruptible: Sequence[nn.Module] = (),
    ) -> None:
        """Make the gradients views of buckets.

        Args:
            model: With equal weights on all replicas.
            buckets: Names of the parameters of each bucket.
            group: All replicas.
            slices: Slices of a step; the first replicas own one each.
            finished_slices: Finished slices of the step; without them every replica finishes its slice.
            interruptible: Modules before whose forward pass a late replica may abandon its slice.
        """
        named = dict(model.named_parameters())
        self._buckets = [_Bucket.of([named[name] for name in names]) for names in buckets]
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self.slices, self._finished_slices = slices, finished_slices
        largest = max(padded_size(bucket.flat.numel(), self._ranks) for bucket in self._buckets)
        device = self._buckets[0].flat.device
        self.buffers = torch.zeros(2, largest, device=device)
        """Sent and received gradients of one bucket."""
        self._relative_s = [1.0] * slices
        """Time of each slice on its own replica, relative to the median."""
        self.used_slice: int | None = None
        """The slice of the last step for which the gradient of this replica was used, if any."""
        self._calls, self._may_abandon = 0, False
        for module in interruptible:
            module.register_forward_pre_hook(self._check)
        for parameter in named.values():
            parameter.register_post_accumulate_grad_hook(self._check)

    def compute(self, accumulate: Callable[[int], Any], audited: bool) -> None:
        """Compute one slice, and sum the gradients of all slices.

        Args:
            accumulate: Adds the gradients of a slice.
            audited: Whether the step is measured: then every replica finishes its slice.
        """
        self._calls += 1
        finished_slices = None if audited else self._finished_slices
        if finished_slices is not None:
            finished_slices.begin(self._calls)
        started, held, spent_s = time.perf_counter(), None, 0.0
        for index in self._choose_slices(finished_slices):
            self._zero_grads()
            with self._abandoning(finished_slices):
                accumulate(index)
                self._synchronize()
                spent_s = time.perf_counter() - started
                if finished_slices is None or finished_slices.add(index):
                    held = index
            if held is not None:
                break
        gathered = self._gather_claims(held, spent_s)
        # Without finished slices in a store each replica has finished its slice, and its owner counts.
        holders = list(range(self.slices)) if finished_slices is None else self._read_claims(gathered)
        self._sum_gradients(holders)
        self.used_slice = held if held is not None and holders[held] == self._rank else None

    def _choose_slices(self, finished_slices: FinishedSlices | None) -> Iterator[int]:
        """The slice of this replica; for a backup all unfinished slices, the slowest ones first."""
        if self._rank < self.slices or finished_slices is None:
            yield self._rank % self.slices
            return
        order = sorted(
            range(self.slices),
            key=lambda s: (-round(self._relative_s[s], 1), (s - self._calls) % self.slices),
        )
        first = (self._rank - self.slices) % self.slices
        order = order[first:] + order[:first]
        yield from (index for index in order if not finished_slices.is_finished(index))

    def _gather_claims(self, held: int | None, spent_s: float) -> Tensor:
        """All-gather which slice each replica holds, and how long that took."""
        own = torch.tensor([-1.0 if held is None else float(held), spent_s], dtype=torch.float64)
        gathered = torch.empty(2 * self._ranks, dtype=torch.float64, device=self.buffers.device)
        all_gather_into(gathered, own.to(gathered.device), group=self._group)
        return gathered

    def _read_claims(self, gathered: Tensor) -> list[int]:
        """The replica of each slice. Notes which replicas are slow."""
        claims = gathered.view(-1, 2).tolist()
        # A store that was lost may name two holders: the first one counts.
        holders = [
            next(rank for rank, (s, _) in enumerate(claims) if s == index) for index in range(self.slices)
        ]
        median_s = statistics.median(claims[rank][1] for rank in holders)
        for index, rank in enumerate(holders):
            if rank != index:
                self._relative_s[index] *= FADING
            elif median_s > 0:
                found = claims[rank][1] / median_s
                self._relative_s[index] += SMOOTHING * (found - self._relative_s[index])
        return holders

    @torch.no_grad()
    def _sum_gradients(self, holders: Sequence[int]) -> None:
        """Sum the gradients of the holders, in the order of the slices, on every replica."""
        holds = self._rank in holders
        for bucket in self._buckets:
            count = bucket.flat.numel()
            size = padded_size(count, self._ranks)
            sent, received = self.buffers[0, :size], self.buffers[1, :size]
            sent.zero_()
            if holds:
                sent[:count].copy_(bucket.flat)
            dist.all_to_all_single(received, sent, group=self._group)
            chunks = received.view(self._ranks, -1)
            first, *others = (chunks[rank] for rank in holders)
            for chunk in others:
                first += chunk
            all_gather_into(sent, first, group=self._group)
            bucket.flat.copy_(sent[:count])

    @contextmanager
    def _abandoning(self, finished_slices: FinishedSlices | None) -> Iterator[None]:
        """End the computation inside when all slices are finished."""
        self._may_abandon = finished_slices is not None
        try:
            yield
        except SliceTakenError:
            pass
        finally:
            self._may_abandon = False

    def _check(self, *_: Any) -> None:
        """Called at the start of a forward pass or a block, and when a gradient is there."""
        if (
            self._may_abandon
            and self._finished_slices is not None
            and self._finished_slices.are_all_finished()
        ):
            raise SliceTakenError

    def _zero_grads(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()

    def _synchronize(self) -> None:
        """Wait for the device: a slice is finished when the device has computed it."""
        if self.buffers.is_cuda:
            torch.cuda.current_stream(self.buffers.device).synchronize()
