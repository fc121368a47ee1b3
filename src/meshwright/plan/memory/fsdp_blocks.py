"""The groups of one block under ZeRO-2 and 3, in bytes: its own, and its experts' where those are apart.

Experts that are cut over ranks of their own are reduced as soon as their backward pass is done, before that
of the router and of attention; what they gave to their reduce-scatter then waits in place of what the block
behind gave. A rank that is alone in its group has no buffer that a gather arrives in, as it copies its own
part; and in place of a reduce-scatter it divides, and copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import is_expert
from meshwright.layout.fsdp_groups import FsdpGroup, group_axis, group_block, offloads_gradients
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, operand_bytes
from meshwright.layout.stages import StageSpec
from meshwright.spec.job import Job


@dataclass(frozen=True)
class FSDPGroup:
    """One group of a block."""

    gathered: int
    """In the precision of the products; its whole gradient is as large."""
    arriving: int
    """What a gather arrives in, until it is copied out."""
    sent: int
    """What it gives to its reduce-scatter."""
    shard: int
    """What it keeps of that, in float32."""
    reducing: int
    """What lives beside what is sent while it is filled, or turned into shards."""
    kept: int
    """Its whole gradient where that waits for the last micro-batch: float32, not padded."""
    last: int
    """Its last gradient, which torch lets go of last."""

    @classmethod
    def of(cls, job: Job, group: FsdpGroup) -> FSDPGroup:
        """Of a group that has parameters."""
        ranks, low = group_axis(job, group).size, operand_bytes(job.train.precision)
        wire, padded = WIRE_BYTES[job.compression.kind], group.padded(ranks)
        # What a reduce-scatter gives, before it is float32.
        given = 0 if wire == FLOAT32_BYTES else padded // ranks * wire
        shard = 0 if offloads_gradients(job) else padded // ranks * FLOAT32_BYTES
        last = group.parameters[-1].count * low
        turned = last + given + shard
        if ranks == 1:
            turned = max(padded * wire + (given or shard), given + shard)
        return cls(
            gathered=padded * low,
            arriving=0 if ranks == 1 else padded * low,
            sent=padded * wire,
            shard=shard,
            reducing=max(padded * low, turned),
            kept=sum(p.count for p in group.parameters) * FLOAT32_BYTES,
            last=last,
        )


NOTHING = FSDPGroup(0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class FSDPBlock:
    """A block: its own group, and that of experts that are apart."""

    own: FSDPGroup
    experts: FSDPGroup
    feed_forward: int
    """The part of the own gradient which is there when the backward pass comes to attention."""
    routed: int
    """The part of `own.kept` that is of routed experts."""

    @classmethod
    def of(cls, job: Job, own: FsdpGroup, experts: FsdpGroup | None) -> FSDPBlock:
        """Of its groups."""
        low = operand_bytes(job.train.precision)
        return cls(
            FSDPGroup.of(job, own),
            FSDPGroup.of(job, experts) if experts else NOTHING,
            sum(p.count for p in own.parameters if ".ffn." in p.name) * low,
            sum(p.count for p in own.parameters if is_expert(p.name)) * FLOAT32_BYTES,
        )

    @property
    def gathered(self) -> int:
        """Both groups."""
        return self.own.gathered + self.experts.gathered

    @property
    def arriving(self) -> int:
        """On their way."""
        return self.own.arriving + self.experts.arriving

    @property
    def shard(self) -> int:
        """Shards of gradients."""
        return self.own.shard + self.experts.shard

    @property
    def kept(self) -> int:
        """Whole gradients that wait."""
        return self.own.kept + self.experts.kept


def list_blocks(job: Job, part: StageSpec) -> tuple[FSDPBlock, ...]:
    """The blocks of a stage, first to last; alike ones are one object."""
    found: list[FSDPBlock] = []
    for layer, times in part.block_kinds:
        *experts, own = group_block(part, layer)
        found += [FSDPBlock.of(job, own, experts[0] if experts else None)] * times
    return tuple(found)
