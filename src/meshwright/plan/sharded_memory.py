"""What ZeRO-2 and 3 add to the moments of a step: gathered groups, shards of gradients, and what is reduced.

Follows torch's FSDP2, eager. In the forward pass a gathered block lies there twice: as parameters, and in the
buffer that it arrived in, which is freed when the next block has come. In the backward pass, while a block is
at work, the block before it is gathered ahead (one buffer), and what the block after it gave to its
reduce-scatter is still there. The group around the blocks is gathered from forward to backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.moments import Moment
from meshwright.plan.shapes import FLOAT32_BYTES
from meshwright.plan.sharding import Group, list_groups
from meshwright.spec.job import Job


@dataclass(frozen=True)
class ShardedMoment:
    """A moment with what sharding adds."""

    name: str
    activations: int
    temporary: int
    gradients: int
    gathered: int
    reduced: int
    formula: str
    gathered_formula: str

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.activations + self.temporary + self.gradients + self.gathered + self.reduced


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the groups; all blocks are alike."""

    ranks: int
    layers: int
    around: int
    block: int
    """A gathered block, in the precision of the products."""
    block_gradient: int
    """A block's whole gradient, in the same."""
    around_reduced: int
    block_reduced: int
    """What is given to a reduce-scatter: float32."""
    zero: int

    @classmethod
    def of(cls, job: Job) -> _Sizes:
        groups, ranks = list_groups(job.model), job.layout.dp_shard
        blocks: list[Group] = [group for group in groups if group.block]
        gathered = blocks[0].gathered_bytes(ranks, job.train.precision)
        return cls(
            ranks=ranks,
            layers=len(blocks),
            around=groups[-1].gathered_bytes(ranks, job.train.precision),
            block=gathered,
            block_gradient=gathered,
            around_reduced=groups[-1].padded(ranks) * FLOAT32_BYTES,
            block_reduced=blocks[0].padded(ranks) * FLOAT32_BYTES,
            zero=job.layout.zero,
        )

    def gathered(self, moment: Moment) -> tuple[int, str]:
        """What is gathered at a moment."""
        around = f"{self.around} (around the blocks)"
        if self.zero == 2:
            count = self.layers  # plus the buffer in which the last one came, until the forward pass ends
            buffers = 0 if moment.backward else 1
        elif moment.backward:
            count = 1 if moment.layer is not None else 0
            buffers = 1 if moment.layer else 0
        else:
            count, buffers = (1 if moment.layer is not None else 0), 1
        formula = f"{around} + {count} blocks and {buffers} on their way x {self.block}"
        return self.around + (count + buffers) * self.block, formula

    def gradients(self, moment: Moment, accumulated: bool) -> tuple[int, int]:
        """Shards of gradients, and what reduce-scatters were given, at a moment."""
        everything = (self.around_reduced + self.layers * self.block_reduced) // self.ranks
        if not moment.backward:
            return (everything if accumulated else 0), 0
        layer = moment.layer if moment.layer is not None else -1
        done = (self.layers - 1 - layer) * self.block_reduced // self.ranks
        reduced = self.block_reduced if layer < self.layers - 1 else 0
        return (everything if accumulated else done), reduced


def trace_sharded(job: Job, moments: Sequence[Moment], micro_batches: int) -> list[ShardedMoment]:
    """The moments of a step of ZeRO-2 or 3.

    Args:
        job: With its layout settled.
        moments: Of the model, without what keeps gradients.
        micro_batches: Of a step; with more than one the shards of all gradients wait through the later ones.
    """
    sizes = _Sizes.of(job)
    found = []
    for moment in moments:
        gathered, formula = sizes.gathered(moment)
        shards, reduced = sizes.gradients(moment, accumulated=micro_batches > 1)
        found.append(
            ShardedMoment(
                name=moment.name,
                activations=moment.activations,
                temporary=moment.temporary,
                gradients=shards,
                gathered=gathered,
                reduced=reduced,
                formula=moment.formula,
                gathered_formula=formula,
            )
        )
    return found
