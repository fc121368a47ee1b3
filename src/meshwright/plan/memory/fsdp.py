"""What ZeRO-2 and 3 add to the moments of a step: gathered groups, shards of gradients, and what is reduced.

Follows torch's FSDP2, eager. A gather arrives in a buffer that is freed when the block is copied out of it.
While a block is at work, the next ``prefetch`` ones are gathered ahead into such buffers. What a block gave
to its reduce-scatter, its whole gradient as it travels, stays until the next one's; while it is filled, the
gradient it is filled from is there too, and shards come when that is gone. The group around the blocks is
gathered from forward to backward, and the head's gradient, made with the loss, waits as long: both are in the
peak. Deferred gradients stay whole, in float32 and not padded, until the last micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.axes import dense_shard_axis
from meshwright.layout.fsdp_groups import FsdpGroup, group_root, offloads_gradients
from meshwright.layout.parameters import FLOAT32_BYTES, WIRE_BYTES, operand_bytes
from meshwright.layout.stages import StageSpec, list_stages
from meshwright.plan.memory.fsdp_blocks import FSDPBlock, list_blocks
from meshwright.plan.memory.snapshots import MemorySnapshot
from meshwright.schedule.pipeline.in_flight import StageState
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

NORM_TENSORS = 6
"""Tensors as large as the residual stream in a norm's backward pass, with the stream's own gradient."""


@dataclass(frozen=True)
class FSDPSnapshot:
    """A moment with what sharding adds."""

    name: str
    activations: int
    temporary: int
    gradients: int
    gathered: int
    reduced: int
    formula: str
    gathered_formula: str


@dataclass(frozen=True)
class MicroBatchPass:
    """One micro-batch of a step, by what it finds and what it leaves."""

    first: bool
    """No gradients are there yet; ZeRO-2 gathers."""
    last: bool
    """ZeRO-2 lets blocks go."""


def _list_passes(micro_batches: int) -> list[MicroBatchPass]:
    """The micro-batches that differ: the first, one in the middle, the last."""
    if micro_batches == 1:
        return [MicroBatchPass(first=True, last=True)]
    passes = [MicroBatchPass(first=True, last=False), MicroBatchPass(first=False, last=True)]
    return passes if micro_batches == 2 else [*passes, MicroBatchPass(first=False, last=False)]


@dataclass(frozen=True)
class FSDPSizes:
    """Bytes of the groups."""

    blocks: tuple[FSDPBlock, ...]
    zero: int
    prefetch: int
    """Blocks gathered ahead."""
    around: int
    """What lies around the blocks, gathered."""
    around_sent: int
    """What it gives to its reduce-scatter: float32, or as compressed gradients are."""
    around_shard: int
    """What it keeps of that, in float32."""
    around_last: int
    """Its last gradient, which torch lets go of last."""
    around_early: int
    """Its gradients that wait through the backward pass of the blocks: the head's, the final norm's."""
    around_late: int
    """Its gradients when the embedding's is made."""
    deferred: bool
    """Whether gradients wait for the last micro-batch."""
    kept_around: int
    """Whole gradients of what lies around the blocks, as they wait."""
    embedding: int
    """The gradient of the embedding's part."""
    tied: int
    """The head's part of a gradient that it shares with the embedding; 0 where it does not."""
    summed: bool
    """Whether autograd adds to kept gradients itself: those of a product in float32."""

    @classmethod
    def of(cls, job: Job, part: StageSpec) -> FSDPSizes:
        """Of all of the model, or of a stage."""
        model, ranks = part.model, dense_shard_axis(job.layout).size
        assert isinstance(model, DecoderModel), "the legality table shards decoders only"
        (outer,) = group_root(part) or [FsdpGroup("nothing", (), block=False)]
        around = {p.name: p.count * FLOAT32_BYTES for p in outer.parameters}
        head = model.vocab_size * model.hidden_size * FLOAT32_BYTES
        tied = model.tied_embeddings and part.whole
        norm = sum(size for name, size in around.items() if name.startswith("norm."))
        stays = 0 if offloads_gradients(job) else 1
        # A tied gradient is made of two parts and their sum.
        late = sum(around.values()) + (2 * head if tied else 0)
        return cls(
            blocks=list_blocks(job, part),
            zero=job.layout.zero,
            prefetch=job.layout.prefetch,
            around=outer.gathered_bytes(ranks, job.train.precision),
            around_sent=outer.padded(ranks) * WIRE_BYTES[job.compression.kind],
            around_shard=stays * outer.padded(ranks) * FLOAT32_BYTES // ranks,
            around_last=outer.parameters[-1].count * FLOAT32_BYTES if outer.parameters else 0,
            around_early=head + norm if part.last else 0,
            around_late=late,
            deferred=job.layout.accumulate == "deferred",
            kept_around=sum(around.values()),
            embedding=head if part.first else 0,
            tied=head if tied else 0,
            summed=operand_bytes(job.train.precision) == FLOAT32_BYTES,
        )

    @property
    def layers(self) -> int:
        """How many blocks."""
        return len(self.blocks)

    @functools.cached_property
    def _sums(self) -> dict[str, list[int]]:
        """Sums over the first blocks, by what is summed."""
        return {
            name: list(itertools.accumulate(map(operator.attrgetter(name), self.blocks), initial=0))
            for name in ("gathered", "arriving", "shard", "kept")
        }

    def _sum(self, name: str, first: int = 0, end: int | None = None) -> int:
        """Of the blocks from one to before another; those that are not there count nothing."""
        sums, end = self._sums[name], self.layers if end is None else min(end, self.layers)
        return sums[end] - sums[min(max(first, 0), end)]

    @functools.cached_property
    def block_shards(self) -> int:
        """Shards of gradients of all blocks."""
        return self._sum("shard")

    @functools.cached_property
    def kept_blocks(self) -> int:
        """Whole gradients of all blocks, as they wait."""
        return self._sum("kept")

    @property
    def kept(self) -> int:
        """Gradients between two micro-batches: shards, or whole where they are deferred."""
        if self.deferred:
            return self.kept_around + self.kept_blocks
        return self.around_shard + self.block_shards

    def idle(self, state: StageState, lends: bool) -> int:
        """What a stage of a pipeline has gathered while it reads no weights.

        Args:
            state: What its earlier passes have left.
            lends: Whether its root group is gathered for another stage, too.
        """
        if self.zero == 2:
            return self.around + self._sum("gathered") if state.in_use else 0
        return self.around if state.after_forward or lends else 0

    def gathered(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int, int]:
        """What is gathered at a moment: around the blocks, of them, and what is on its way."""
        around, layer, letting_go = self.around, snapshot.layer, self.zero == 3 or run.last
        if layer is not None and snapshot.backward and letting_go:
            below = self._sum("gathered", 0, layer) if self.zero == 2 else 0
            blocks, buffers = self._at_work_gathered(self.blocks[layer], layer, snapshot.part)
            blocks += below
        elif self.zero == 3 and not snapshot.backward:
            blocks = self.blocks[layer].gathered if layer is not None else 0
            ahead = layer + 1 if layer is not None else self.layers
            buffers = self._sum("arriving", ahead, ahead + self.prefetch)
        else:
            gone = layer is None and snapshot.backward and letting_go
            around = 0 if gone and snapshot.part == "reduced" else around
            blocks, buffers = 0 if gone else self._sum("gathered"), 0
        return around, blocks, buffers

    def _at_work_gathered(self, block: FSDPBlock, layer: int, part: str) -> tuple[int, int]:
        """Of the block at work on the way back, and what is on its way meanwhile; blocks are let go."""
        own, everything = block.own.gathered, block.gathered
        there = {"reduced": 0, "experts": own, "attention": own, "last": own, "gathered": own}
        gathered = there.get(part, everything)
        if self.zero == 2:
            return gathered, 0
        ahead = self._sum("arriving", layer - self.prefetch, layer)
        if part == "gathered":  # its own buffers; the farthest one ahead is not asked for yet
            ahead = self._sum("arriving", layer - max(self.prefetch - 1, 0), layer)
            ahead += block.own.arriving + (block.experts.arriving if self.prefetch else 0)
        elif part == "experts gathered":
            ahead += block.experts.arriving
        return gathered, ahead

    def gradients(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """Gradients, in shards and whole, and what reduce-scatters were given, at a moment."""
        if self.deferred and not (run.first and run.last):
            return self._deferred_gradients(snapshot, run)
        everything = self.around_shard + self.block_shards
        if not snapshot.backward:
            return (0 if run.first else everything), 0
        if snapshot.layer is None:
            shards = self.block_shards if run.first else everything
            if snapshot.part == "around":
                return shards + self.around_late, self.blocks[0].own.sent
            return shards + max(self.kept_around, self.around_last + self.around_shard), self.around_sent
        block, behind = self.blocks[snapshot.layer], self.blocks[snapshot.layer + 1 : snapshot.layer + 2]
        shards = self._sum("shard", snapshot.layer + 1) if run.first else everything
        whole, sent = self._at_work(block, snapshot.part)
        if run.first and snapshot.part in ("attention", "last", "reduced"):
            shards += block.experts.shard
        if snapshot.part == "reduced":
            whole = block.own.reducing
        elif snapshot.part == "experts":
            whole += block.experts.reducing
        return shards + self.around_early + whole, sent or (behind[0].own.sent if behind else 0)

    @staticmethod
    def _at_work(block: FSDPBlock, part: str) -> tuple[int, int]:
        """Whole gradients of a block on its way back, and what it has sent itself."""
        whole = {
            "experts": block.feed_forward,
            "attention": block.feed_forward,
            "last": block.own.gathered,
            "reduced": block.own.gathered,
        }
        sent = {
            "experts": block.experts.sent,
            "attention": block.experts.sent,
            "last": block.experts.sent,
            "reduced": block.own.sent,
        }
        return whole.get(part, 0), sent.get(part, 0)

    def _deferred_gradients(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """The same where gradients wait whole: they come in the first micro-batch, and go in the last."""
        everything = self.kept_around + self.kept_blocks
        if not snapshot.backward:
            return (0 if run.first else everything), 0
        if snapshot.layer is None:
            return self._deferred_around(snapshot, run)
        block, behind = self.blocks[snapshot.layer], self.blocks[snapshot.layer + 1 : snapshot.layer + 2]
        own, sent = self._at_work(block, snapshot.part)
        if snapshot.part == "experts":
            own += block.experts.gathered
        if run.first:
            kept = self.around_early + self._sum("kept", snapshot.layer + 1)
        elif run.last:
            there = self._sum("kept", 0, snapshot.layer + 1)
            kept = self.kept_around + self.tied + there + self._sum("shard", snapshot.layer + 1)
        else:
            kept = everything + self.tied
        if run.first and snapshot.part == "reduced":
            own = block.kept + (0 if self.summed else block.own.last)
        elif self.summed and not run.first:
            own = 0
        elif run.last and snapshot.part == "reduced" and not behind:
            own = 0  # added before the first buffer to send is made; later ones follow another
        if not run.last:
            return kept + own, 0
        return kept + own, sent or (behind[0].own.sent if behind else 0)

    def _deferred_around(self, snapshot: MemorySnapshot, run: MicroBatchPass) -> tuple[int, int]:
        """The same when the blocks are done."""
        blocks = self.block_shards if run.last else self.kept_blocks
        sent = self.blocks[0].own.sent if snapshot.part == "around" else self.around_sent
        reduced = sent if run.last else 0
        if snapshot.part != "around":
            return blocks + self.kept_around, reduced
        # The embedding's part is made whole before it is added; a tied one is the sum of two parts.
        made = self.around_late if run.first else self.kept_around + self.embedding + 2 * self.tied
        return blocks + made, reduced


def _gathered_snapshots(job: Job, snapshots: Sequence[MemorySnapshot]) -> list[MemorySnapshot]:
    """Each block copied out of its gather on ZeRO-3's way back, when the one behind it was done."""
    if job.layout.zero != 3:
        return []
    before = [m for m in snapshots if m.part == "reduced" and m.layer]
    return [
        dataclasses.replace(m, name=f"block {m.layer - 1}, gathered", layer=m.layer - 1, part="gathered")
        for m in before
        if m.layer is not None
    ]


def _last_snapshots(snapshots: Sequence[MemorySnapshot]) -> list[MemorySnapshot]:
    """Each block when its last gradient is made, that of its first norm, and all of them are whole."""
    return [
        dataclasses.replace(
            m, name=f"block {m.layer}, last gradient", temporary=NORM_TENSORS * m.temporary, part="last"
        )
        for m in snapshots
        if m.part == "reduced" and m.layer is not None
    ]


def find_fsdp_peak(job: Job, snapshots: Sequence[MemorySnapshot], micro_batches: int) -> FSDPSnapshot:
    """The fullest moment of a step of ZeRO-2 or 3, of equal ones the first.

    Args:
        job: With its layout settled.
        snapshots: Of the model.
        micro_batches: Of a step.
    """
    sizes, largest, top = FSDPSizes.of(job, list_stages(job)[0]), -1, None
    every = (*snapshots, *_gathered_snapshots(job, snapshots), *_last_snapshots(snapshots))
    for run in _list_passes(micro_batches):  # the micro-batches that differ
        for snapshot in every:
            temporary = (
                0 if snapshot.part == "around" else snapshot.temporary
            )  # the embedding's is a gradient
            alive = snapshot.activations + temporary + sum(sizes.gathered(snapshot, run))
            alive += sum(sizes.gradients(snapshot, run))
            if alive > largest:
                largest, top = alive, (snapshot, run, temporary)
    assert top is not None, "a step has moments"
    snapshot, run, temporary = top
    around, blocks, buffers = sizes.gathered(snapshot, run)
    gradients, reduced = sizes.gradients(snapshot, run)
    return FSDPSnapshot(
        name=snapshot.name,
        activations=snapshot.activations,
        temporary=temporary,
        gradients=gradients,
        gathered=around + blocks + buffers,
        reduced=reduced,
        formula=snapshot.formula,
        gathered_formula=f"{around} (around the blocks) + {blocks} (blocks) + {buffers} (on their way)",
    )
