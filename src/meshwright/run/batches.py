"""Which rank trains on which samples, in micro-batches of one size.

Samples of a step are a function of the position alone. They are dealt to the data ranks as evenly as
possible; a rank with fewer fills up with zero-weight samples, whose targets are all ignored, so that every
rank runs the same number of micro-batches of the same shape and no global batch is illegal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.prepare.dataset import IGNORED, Rows, TokenDataset
from meshwright.run.parallel.context import SharedContext

Samples = npt.NDArray[np.int64]
"""Numbers of samples."""


def deal(count: int, rank: int, ranks: int) -> range:
    """The part of ``count`` samples that falls to a rank: contiguous, sizes differ by at most one."""
    base, extra = divmod(count, ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def cut(samples: Samples, rank: int, ranks: int, micro_batch: int, least: int = 0) -> Iterator[Samples]:
    """A rank's samples, a micro-batch at a time; as many as the fullest rank needs, the last ones short.

    With ``least``, as many as that number of samples would need.
    """
    mine = samples[list(deal(len(samples), rank, ranks))]
    fullest = len(deal(max(len(samples), least), 0, ranks))
    for start in range(0, fullest, micro_batch):
        yield mine[start : start + micro_batch]


@dataclass(frozen=True)
class Batcher:
    """Cuts lists of samples into this rank's micro-batches."""

    dataset: TokenDataset
    rank: int
    ranks: int
    micro_batch: int
    context: SharedContext | None = None
    """Which positions of its samples this rank has; None for all."""

    def micro_batches(self, samples: Samples, least: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The model's arguments, each (micro_batch, seq_len); as many as the fullest rank needs.

        Tokens and targets; with ``data.mask=document`` also segments, the number of each token's document.
        Where ranks share sequences, tokens and targets are those of this rank's positions.
        """
        for part in cut(samples, self.rank, self.ranks, self.micro_batch, least):
            yield self._pad(self.dataset.read(part))

    def count_targets(self, samples: Samples) -> int:
        """Targets of all ranks together: every rank knows the divisor of the loss without asking."""
        return self.dataset.count_targets(samples)

    def _pad(self, rows: Rows) -> tuple[Tensor, ...]:
        """Fill up with zero-weight samples: zeros, one document, no target."""
        missing = ((0, self.micro_batch - len(rows.tokens)), (0, 0))
        arrays = [np.pad(rows.tokens, missing), np.pad(rows.targets, missing, constant_values=IGNORED)]
        if rows.segments is not None:
            arrays.append(np.pad(rows.segments, missing))
        tokens, targets, *segments = (torch.from_numpy(array) for array in arrays)
        if self.context is not None:
            tokens, targets = self.context.own_columns(tokens), self.context.own_columns(targets)
        return tokens, targets, *segments
