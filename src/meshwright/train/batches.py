"""Which rank trains on which samples, in micro-batches of one size.

Samples of a step are a function of the position alone. They are dealt to the data ranks as evenly as
possible; a rank with fewer fills up with zero-weight samples, whose targets are all ignored, so that every
rank runs the same number of micro-batches of the same shape and no global batch is illegal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshwright.data.dataset import IGNORE_INDEX, SampleBatch, TokenDataset
from meshwright.data.order import SampleOrder
from meshwright.parallel.batch import Batch
from meshwright.parallel.context import ContextParallel

Samples = npt.NDArray[np.int64]
"""Numbers of samples."""


def assign_samples(count: int, rank: int, ranks: int) -> range:
    """The part of ``count`` samples that falls to a rank: contiguous, sizes differ by at most one."""
    base, extra = divmod(count, ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def split_into_micro_batches(
    samples: Samples, rank: int, ranks: int, micro_batch: int, min_samples: int = 0
) -> Iterator[Samples]:
    """A rank's samples, a micro-batch at a time; as many as the fullest rank needs, the last ones short.

    With ``least``, as many as that number of samples would need.
    """
    mine = samples[list(assign_samples(len(samples), rank, ranks))]
    fullest = len(assign_samples(max(len(samples), min_samples), 0, ranks))
    for start in range(0, fullest, micro_batch):
        yield mine[start : start + micro_batch]


@dataclass(frozen=True)
class Batcher:
    """Cuts lists of samples into this rank's micro-batches."""

    dataset: TokenDataset
    rank: int
    ranks: int
    micro_batch: int
    context: ContextParallel | None = None
    """Which positions of its samples this rank has; None for all."""
    sample_weight: float | None = None
    """Of one sample in the global batch, where the model wants to know it; a zero-weight one has none."""

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """The model's arguments; as many micro-batches as the fullest rank needs."""
        for part in split_into_micro_batches(samples, self.rank, self.ranks, self.micro_batch, min_samples):
            yield self._pad(self.dataset.read(part))

    def count_targets(self, samples: Samples) -> int:
        """Targets of all ranks together: every rank knows the divisor of the loss without asking."""
        return self.dataset.count_targets(samples)

    def _pad(self, rows: SampleBatch) -> Batch:
        """Fill up with zero-weight samples: zeros, one document, no target."""
        count = len(rows.tokens)
        tokens, targets, segments = rows.tokens, rows.targets, rows.segments
        if count < self.micro_batch:
            missing = ((0, self.micro_batch - count), (0, 0))
            tokens, targets = np.pad(tokens, missing), np.pad(targets, missing, constant_values=IGNORE_INDEX)
            segments = segments if segments is None else np.pad(segments, missing)
        weights = None
        if self.sample_weight is not None:
            weights = torch.zeros(self.micro_batch)
            weights[:count] = self.sample_weight
        documents = segments if segments is None else torch.from_numpy(segments)
        batch = Batch(torch.from_numpy(tokens), torch.from_numpy(targets), documents, weights)
        if self.context is None:
            return batch
        mine = self.context.local_columns
        return batch._replace(inputs=mine(batch.inputs), targets=mine(batch.targets))


class Source(Protocol):
    """What micro-batches are cut by: of tokens or of images."""

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """This rank's, in order."""

    def count_targets(self, samples: Samples) -> int:
        """Of all ranks together."""


class StepBatch(NamedTuple):
    """What a step trains on."""

    position: int
    """Samples consumed before it."""
    samples: Samples
    """Those of all ranks."""
    targets: int
    """That count in the loss, on all ranks."""
    micro_batches: Iterator[Batch]
    """Those of this rank, each read when it is asked for."""


class BatchPrefetcher:
    """Gives every step its batch; on a GPU the next one's is prepared while the device computes this one.

    Then its samples are chosen, its targets counted, and its first micro-batch lies in pinned memory when the
    step begins; the others are read while the device is at work on those before them. One micro-batch is
    ahead, on the host: the device's memory holds what it held. On a CPU host and device are one, and
    nothing is gained: a batch is made when its step begins.
    """

    def __init__(self, order: SampleOrder, source: Source, global_batch: int, device: torch.device) -> None:
        self._order, self._source, self._global_batch = order, source, global_batch
        self._on_gpu = device.type == "cuda"
        self._next: StepBatch | None = None

    def get(self, position: int) -> StepBatch:
        """The batch of the step that begins at a position."""
        ready, self._next = self._next, None
        if ready is not None and ready.position == position:
            return ready
        positions = np.arange(position, position + self._global_batch)
        samples = self._order.samples_at(positions)
        targets = self._source.count_targets(samples)
        return StepBatch(position, samples, targets, self._source.micro_batches(samples))

    def prefetch(self, position: int) -> None:
        """Make the batch at a position ready, where that saves time."""
        if self._on_gpu:
            batch = self.get(position)
            first = [micro_batch.pin_memory() for micro_batch in islice(batch.micro_batches, 1)]
            self._next = batch._replace(micro_batches=chain(first, batch.micro_batches))
