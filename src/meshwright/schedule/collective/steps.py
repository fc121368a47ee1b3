"""A collective schedule: the ordered steps of each rank.

Generators build it, the prover checks it, the simulator assigns times, the plot draws it and an interpreter
runs it. The rules of a schedule:

- A tensor is split into chunks (:meth:`CollectiveSchedule.spans`). A message carries the chunks
  ``start`` to ``stop - 1`` from one rank to another; they are contiguous in the tensor.
- The sends and receives of one step are concurrent. A send reads its chunks as they were before the step.
  A receive that reduces may overlap a send of the same step: add after the send has read. A receive that
  copies never overlaps one.
- The steps of a rank are in order: a step starts when the one before it is complete.
- Messages from one rank to another are matched in order (FIFO).
- An interpreter may run ahead of the steps, for example to pipeline parts of chunks. It must keep three
  orders: of the messages of each pair of ranks; a send after all earlier receives into its chunks; a receive
  after all earlier (or same-step) sends of its chunks and all earlier receives into them.
- A chunk that a rank was not given and has not received is undefined there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from meshwright.schedule.collective.ops import Op


class Combine(StrEnum):
    """What a receive does with the data."""

    COPY = "copy"
    """Replaces the chunks."""
    REDUCE = "reduce"
    """Adds to the chunks (or takes the maximum, and so on: the operator of the reduction)."""


class Send(NamedTuple):
    """A message to a peer."""

    peer: int
    start: int
    """First chunk."""
    stop: int
    """One past the last chunk."""

    def __str__(self) -> str:
        return f"sends {name_chunks(self.start, self.stop)} to rank {self.peer}"


class Receive(NamedTuple):
    """A message from a peer."""

    peer: int
    start: int
    """First chunk."""
    stop: int
    """One past the last chunk."""
    combine: Combine

    def __str__(self) -> str:
        verb = "adds" if self.combine is Combine.REDUCE else "copies"
        return f"{verb} {name_chunks(self.start, self.stop)} from rank {self.peer}"


class Step(NamedTuple):
    """Sends and receives of one rank that are concurrent."""

    round: int
    """The round of the algorithm, counted over all ranks from 0; a rank may be idle in a round."""
    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


Rows = tuple[tuple[Step, ...], ...]
"""The steps of every rank, in order."""


@dataclass(frozen=True)
class CollectiveSchedule:
    """A schedule: the steps of every rank, and how a tensor is split into chunks.

    The tensor is the larger of input and output: of broadcast, reduce and all-reduce the tensor of each rank;
    of scatter and gather that of the root; of all-gather the output; of reduce-scatter the input. Chunks of
    scatter, gather, all-gather and reduce-scatter belong to blocks, one per rank: block r is rank r's. The
    tensor of all-to-all is the input of each rank, block d for rank d; its chunks are numbered over the
    inputs of all ranks: those of source s and target d are part of block ``s * ranks + d``.
    """

    op: Op
    algorithm: str
    ranks: int
    """Number of ranks."""
    root: int | None
    """Root of broadcast, scatter, gather and reduce; None for the others."""
    blocks: int
    """Equal blocks of the tensor; of all-to-all: of the inputs of all ranks together."""
    parts: int
    """Chunks per block."""
    rows: Rows = field(repr=False)
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of each node, or row of the grid; of hierarchical and 2-D algorithms."""

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.blocks * self.parts

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return max((row[-1].round + 1 for row in self.rows if row), default=0)

    def buffer_elements(self, elements: int) -> int:
        """Elements of the buffer that :meth:`spans` refers to; more than the tensor for all-to-all only."""
        return elements * self.ranks if self.op is Op.ALL_TO_ALL else elements

    def spans(self, elements: int) -> tuple[tuple[int, int], ...]:
        """First element and one past the last of each chunk, for a tensor of any number of elements.

        Blocks and their parts differ by one element at most; with fewer elements than chunks some are empty.
        """
        tensors = self.ranks if self.op is Op.ALL_TO_ALL else 1
        found: list[tuple[int, int]] = []
        for tensor in range(tensors):
            for low, high in split_evenly(tensor * elements, (tensor + 1) * elements, self.blocks // tensors):
                found.extend(split_evenly(low, high, self.parts))
        return tuple(found)

    def span(self, start: int, stop: int, elements: int) -> tuple[int, int]:
        """First element and one past the last of a message's chunks. Use :meth:`spans` for many."""
        spans = self.spans(elements)
        return spans[start][0], spans[stop - 1][1]

    def block_chunks(self, block: int) -> range:
        """The chunks of a block."""
        return range(block * self.parts, (block + 1) * self.parts)


def split_evenly(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    """Split a range into ``count`` parts; the first ones are longer by one."""
    size, longer = divmod(high - low, count)
    for index in range(count):
        start = low + index * size + min(index, longer)
        yield start, start + size + (index < longer)


def name_chunks(start: int, stop: int) -> str:
    """Chunks in words."""
    return f"chunk {start}" if stop - start == 1 else f"chunks {start} to {stop - 1}"
