"""Assigns samples to ranks and splits them into micro-batches (gradient accumulation) of one size.

The samples of a step depend on the position only. They are split over the data ranks as evenly as possible.
A rank with fewer samples is padded with zero-weight samples, whose targets are ignored. So every rank runs
the same number of micro-batches of the same shape, and every global batch is legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshwright.data.dataset import IGNORE_INDEX, SampleBatch, TokenDataset
from meshwright.data.order import Order
from meshwright.parallel.batch import Batch
from meshwright.parallel.context import ContextParallel

Samples = npt.NDArray[np.int64]
"""Sample indices."""


def assign_samples(count: int, rank: int, ranks: int) -> range:
    """The contiguous range of ``count`` samples of one rank; sizes differ by at most one.

    Further ranks (backup replicas, in an evaluation) get none.
    """
    if rank >= ranks:
        return range(count, count)
    base, extra = divmod(count, ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def split_into_micro_batches(
    samples: Samples, rank: int, ranks: int, micro_batch: int, min_samples: int = 0
) -> Iterator[Samples]:
    """The samples of a rank, one micro-batch at a time; the last ones may be short or empty.

    All ranks get as many micro-batches as the rank with most samples, or as ``min_samples`` would need.
    """
    local = samples[list(assign_samples(len(samples), rank, ranks))]
    fullest = len(assign_samples(max(len(samples), min_samples), 0, ranks))
    for start in range(0, fullest, micro_batch):
        yield local[start : start + micro_batch]


@dataclass(frozen=True)
class Batcher:
    """Splits samples of tokens into the micro-batches of this rank."""

    dataset: TokenDataset
    rank: int
    ranks: int
    micro_batch: int
    context: ContextParallel | None = None
    """The positions of each sample that this rank reads; None for all."""
    sample_weight: float | None = None
    """Weight of a real sample, 1 / global batch, for models whose auxiliary losses need it; padding has 0."""

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """The arguments of the model, micro-batch by micro-batch."""
        for part in split_into_micro_batches(samples, self.rank, self.ranks, self.micro_batch, min_samples):
            yield self._pad(self.read(part))

    def read(self, samples: Samples) -> SampleBatch:
        """The tokens and targets of some samples."""
        return self.dataset.read(samples)

    def count_targets(self, samples: Samples) -> int:
        """Target tokens of all ranks: every rank computes the divisor of the loss without a collective."""
        return self.dataset.count_targets(samples)

    def _pad(self, rows: SampleBatch) -> Batch:
        """Pad with zero-weight samples: zeros, one document, no target."""
        count = len(rows.tokens)
        tokens, targets, segments = rows.tokens, rows.targets, rows.segments
        if count < self.micro_batch:
            missing = ((0, self.micro_batch - count), (0, 0))
            tokens, targets = np.pad(tokens, missing), np.pad(targets, missing, constant_values=IGNORE_INDEX)
            segments = segments if segments is None else np.pad(segments, missing)
        weights = None
        if self.sample_weight is not None:
            weights = torch.zeros(self.micro_batch, 2)
            weights[:count, 0] = self.sample_weight
            weights[:count, 1] = tokens.shape[1] if rows.lengths is None else torch.from_numpy(rows.lengths)
        documents = segments if segments is None else torch.from_numpy(segments)
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(targets), documents, weights)
        if self.context is None:
            return batch
        local = self.context.local_columns
        return batch._replace(inputs=local(batch.inputs), targets=local(batch.targets))


class SliceReader:
    """The micro-batches of one step by slice, for replicas that choose their slice (backup replicas)."""

    def __init__(self, batcher: Batcher, samples: Samples) -> None:
        """Read nothing yet.

        Args:
            batcher: Batcher of the training data.
            samples: Samples of all ranks.
        """
        self._batcher, self._samples = batcher, samples

    def read(self, index: int) -> Iterator[Batch]:
        """The micro-batches of a slice."""
        return replace(self._batcher, rank=index).micro_batches(self._samples)

    def __iter__(self) -> Iterator[Batch]:
        return self.read(self._batcher.rank)


@dataclass(frozen=True)
class SliceSource:
    """Gives the micro-batches of a step by slice."""

    batcher: Batcher

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> SliceReader:
        """The micro-batches of all slices."""
        return SliceReader(self.batcher, samples)

    def count_targets(self, samples: Samples) -> int:
        """Targets of all ranks."""
        return self.batcher.count_targets(samples)


class Source(Protocol):
    """Gives micro-batches of tokens or of images."""

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterable[Batch]:
        """The micro-batches of this rank, in order."""

    def count_targets(self, samples: Samples) -> int:
        """Targets of all ranks."""


class StepBatch(NamedTuple):
    """The batch of one step."""

    position: int
    """Samples consumed before this step."""
    samples: Samples
    """Sample indices of all ranks."""
    targets: int
    """Target tokens of all ranks."""
    micro_batches: Iterable[Batch]
    """The micro-batches of this rank, read lazily."""


class BatchPrefetcher:
    """Gives each step its batch; on a GPU the next batch is prefetched while the device computes.

    Prefetching chooses the samples, counts the targets, and reads the first micro-batch into pinned memory.
    The other micro-batches are read while the device computes the ones before them. Only one micro-batch is
    ahead, in CPU memory, so device memory does not grow. On a CPU prefetching gains nothing and is skipped.
    """

    def __init__(self, order: Order, source: Source, global_batch: int, device: torch.device) -> None:
        self._order, self._source, self._global_batch = order, source, global_batch
        self._on_gpu = device.type == "cuda"
        self._next: StepBatch | None = None

    def get(self, position: int) -> StepBatch:
        """The batch of the step at a position."""
        ready, self._next = self._next, None
        if ready is not None and ready.position == position:
            return ready
        positions = np.arange(position, position + self._global_batch)
        samples = self._order.samples_at(positions)
        targets = self._source.count_targets(samples)
        return StepBatch(position, samples, targets, self._source.micro_batches(samples))

    def prefetch(self, position: int) -> None:
        """Prefetch the batch at a position, on a GPU."""
        if self._on_gpu:
            batch = self.get(position)
            if isinstance(batch.micro_batches, SliceReader):  # the slice is chosen later
                return
            read = iter(batch.micro_batches)
            first = [micro_batch.pin_memory() for micro_batch in islice(read, 1)]
            self._next = batch._replace(micro_batches=chain(first, read))
