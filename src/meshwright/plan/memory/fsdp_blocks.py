"""Bytes of one block's FSDP groups: its main group, and its experts' where these have their own ranks.

Experts with a separate shard axis are reduced as soon as their backward is done, before that of
the router and of attention. The input of their reduce-scatter then replaces that of the block behind. A group
of one rank has no all-gather buffer, because it copies its own shard; instead of a reduce-scatter it divides
and copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import is_expert
from meshwright.layout.fsdp_groups import FsdpGroup, group_axis, group_block, offloads_gradients
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, operand_bytes
from meshwright.layout.stages import StageSpec
from meshwright.spec.job import Job


@dataclass(frozen=True)
class GroupSizes:
    """One FSDP group of a block."""

    gathered: int
    """All-gathered parameters in the precision of GEMMs; the unsharded gradient has the same size."""
    gather_buffer: int
    """Output of the all-gather, until it is copied out."""
    reduce_input: int
    """Input of the reduce-scatter."""
    shard_grad: int
    """The sharded gradient in float32."""
    reduce_temp: int
    """Live beside the reduce-scatter's input while it is filled, or while its output is cast."""
    full_grad: int
    """The unsharded gradient under deferred accumulation: float32, not padded."""
    last_grad: int
    """The gradient of its last parameter, which torch frees last."""

    @classmethod
    def of(cls, job: Job, group: FsdpGroup) -> GroupSizes:
        """Sizes of a group that has parameters."""
        ranks, elem = group_axis(job, group).size, operand_bytes(job.train.precision)
        wire, padded = WIRE_BYTES[job.compression.kind], group.padded(ranks)
        # The output of the reduce-scatter, before the cast to float32.
        output = 0 if wire == FLOAT32_BYTES else padded // ranks * wire
        shard = 0 if offloads_gradients(job) else padded // ranks * FLOAT32_BYTES
        last = group.parameters[-1].count * elem
        cast = last + output + shard
        if ranks == 1:
            cast = max(padded * wire + (output or shard), output + shard)
        return cls(
            gathered=padded * elem,
            gather_buffer=0 if ranks == 1 else padded * elem,
            reduce_input=padded * wire,
            shard_grad=shard,
            reduce_temp=max(padded * elem, cast),
            full_grad=sum(p.count for p in group.parameters) * FLOAT32_BYTES,
            last_grad=last,
        )


NO_GROUP = GroupSizes(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class BlockGroups:
    """A block: its main group, and that of experts with their own ranks."""

    main: GroupSizes
    experts: GroupSizes
    ffn_grad: int
    """The part of the main gradient that exists when backward reaches attention."""
    routed_grad: int
    """The part of `main.full_grad` that belongs to routed experts."""

    @classmethod
    def of(cls, job: Job, main: FsdpGroup, experts: FsdpGroup | None) -> BlockGroups:
        """Sizes of its groups."""
        elem = operand_bytes(job.train.precision)
        return cls(
            GroupSizes.of(job, main),
            GroupSizes.of(job, experts) if experts else NO_GROUP,
            sum(p.count for p in main.parameters if ".ffn." in p.name) * elem,
            sum(p.count for p in main.parameters if is_expert(p.name)) * FLOAT32_BYTES,
        )

    @property
    def gathered(self) -> int:
        """All-gathered parameters of both groups."""
        return self.main.gathered + self.experts.gathered

    @property
    def gather_buffer(self) -> int:
        """All-gather buffers of both groups."""
        return self.main.gather_buffer + self.experts.gather_buffer

    @property
    def shard_grad(self) -> int:
        """Sharded gradients of both groups."""
        return self.main.shard_grad + self.experts.shard_grad

    @property
    def full_grad(self) -> int:
        """Unsharded float32 gradients of both groups."""
        return self.main.full_grad + self.experts.full_grad


def list_blocks(job: Job, part: StageSpec) -> tuple[BlockGroups, ...]:
    """The blocks of a stage, first to last; identical blocks are one object."""
    found: list[BlockGroups] = []
    for layer, times in part.block_kinds:
        *experts, main = group_block(part, layer)
        found += [BlockGroups.of(job, main, experts[0] if experts else None)] * times
    return tuple(found)
