"""What a ResNet's step holds, moment by moment: a walk over the eager backward pass, operation by operation.

With B images in a micro-batch, e bytes an element (2 under bf16 and fp16, else 4) and N = B x channels x
height x width of what a convolution writes, each convolution with its norm and ReLU keeps on CPU::

    N e (read by the norm) + N e (ReLU's output, read by the next convolution) + the norm's statistics

and in 16 bits a copy of its weight; the norm in front of a residual's sum keeps N e, the sum N e once more.
A GroupNorm's statistics are 2 x B x groups x 4, a BatchNorm's 2 x channels x 4. A max-pool keeps the index of
each pixel that it took, in 8 bytes. ReLU and the sum work in place, so they hold nothing beside their input.

On GPUs autocast computes GroupNorm in float32: what norms and ReLUs hold then has 4 bytes, and each
convolution keeps a 16-bit copy of what it reads. Workspaces of the convolution library are not counted.

Recomputation ``full`` keeps the input of each block; one whole block lives while its backward pass runs.

On CPU a micro-batch is read while the one before it still lives: two batches beside the sums of gradients.
That is the peak where a net is so small that its activations take less than its images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.layout.parameters import FLOAT32_BYTES, Parameter, count_statistics, operand_bytes
from meshwright.layout.resnet_shapes import BlockShape, Conv, NetShape, list_convs
from meshwright.plan.contract import Line
from meshwright.plan.memory.snapshots import MemorySnapshot, StepMemory
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel

INT64_BYTES = 8


def trace_resnet(
    job: Job, model: ResNetModel, parameters: Sequence[Parameter], micro_batch: int, persistent_grads: bool
) -> StepMemory:
    """The moments of a step.

    Args:
        job: With its layout settled.
        model: The job's model.
        parameters: Of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Whether gradients live through the whole step (DDP's buckets, accumulation).
    """
    sizes = _Sizes.of(job, model, micro_batch)
    all_gradients = sum(p.count for p in parameters) * FLOAT32_BYTES
    net = list_convs(model)
    walk = _Walk(sizes, net, all_gradients if persistent_grads else None)
    walk.run()
    left = (walk.activations, walk.temporary, walk.gradients)
    assert left == (0, 0, all_gradients), f"the walk through the backward pass ends with {left}"
    pixels = model.channels * model.image_size**2
    batch = micro_batch * (pixels * FLOAT32_BYTES + INT64_BYTES)
    buffers = [Line("batch", batch, f"{micro_batch} x ({pixels} pixels x 4 + 8 (label))")]
    snapshots = list(walk.snapshots)
    samples = -(-job.train.global_batch // job.layout.data_degree)
    if job.cluster.device == "cpu" and samples > micro_batch:
        snapshots.append(MemorySnapshot("next micro-batch", 0, batch, all_gradients, "none"))
    if statistics := count_statistics(model):
        buffers.append(Line("running statistics", statistics * FLOAT32_BYTES, f"{statistics} x 4"))
    return StepMemory(
        snapshots=tuple(snapshots),
        buffers=tuple(buffers),
        activation_bytes=sizes.kept(net),
        touched_bytes=dataclasses.replace(sizes, recomputed=False).kept(net),
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what one micro-batch's operations hold."""

    batch: int
    classes: int
    low: int
    """Bytes of an element that a convolution reads and writes: 2 under bf16 and fp16."""
    wide: int
    """Bytes of an element that a norm or a ReLU reads and writes."""
    groups: int
    """Of a GroupNorm; 0 for BatchNorm."""
    recomputed: bool

    @classmethod
    def of(cls, job: Job, model: ResNetModel, micro_batch: int) -> _Sizes:
        low = operand_bytes(job.train.precision)
        wide = FLOAT32_BYTES if job.cluster.device == "cuda" and model.norm == "group" else low
        groups = model.groups if model.norm == "group" else 0
        recomputed = job.layout.recompute == "full"
        return cls(micro_batch, model.num_classes, low, wide, groups, recomputed)

    def read(self, conv: Conv) -> int:
        """What a convolution reads, as its neighbours hold it."""
        return self.batch * conv.in_elements * self.wide

    def written(self, conv: Conv) -> int:
        """What stands behind a convolution: its output as the norm reads it, the norm's, and ReLU's."""
        return self.batch * conv.out_elements * self.wide

    def statistics(self, conv: Conv) -> int:
        """Mean and deviation that a norm keeps."""
        return 2 * (self.batch * self.groups or conv.out_channels) * FLOAT32_BYTES

    def weight_copy(self, conv: Conv) -> int:
        """The weight in 16 bits."""
        return conv.weights * self.low if self.low != FLOAT32_BYTES else 0

    def input_copy(self, conv: Conv, given: int | None = None) -> int:
        """What a convolution reads, cast to 16 bits; nothing where it is that already."""
        return self.batch * conv.in_elements * self.low if self.low != (given or self.wide) else 0

    def conv(self, conv: Conv) -> int:
        """What a convolution and its norm keep for themselves: the norm's input, statistics, copies."""
        copies = self.weight_copy(conv) + self.input_copy(conv)
        return self.written(conv) + self.statistics(conv) + copies

    def inside(self, block: BlockShape) -> int:
        """What a block keeps, its output included and its input not."""
        return sum(self.conv(conv) for conv in block.convs) + sum(self.written(p) for p in block.parts)

    def stem(self, net: NetShape) -> int:
        """What the stem keeps, its output included."""
        stem = net.stem
        kept = self.written(stem) * 2 + self.statistics(stem) + self.weight_copy(stem)
        return kept + self.input_copy(stem, given=FLOAT32_BYTES) + self.pool(net)

    def pool(self, net: NetShape) -> int:
        """The pooled image and where each of its pixels came from."""
        pixels = self.batch * net.blocks[0].parts[0].in_elements if net.pooled else 0
        return pixels * (self.wide + INT64_BYTES)

    def head(self, net: NetShape) -> int:
        """What the classifier and the loss keep."""
        copies = net.features * (self.classes + (self.wide != self.low) * self.batch)
        low = copies * self.low if self.low != FLOAT32_BYTES else 0
        return self.batch * (net.features * self.wide + self.classes * FLOAT32_BYTES) + low

    def kept(self, net: NetShape) -> int:
        """Everything that waits for the backward pass."""
        if self.recomputed:  # what each block reads: the stem's output, and those of all blocks but the last
            blocks = sum(self.written(block.parts[-1]) for block in net.blocks[:-1])
        else:
            blocks = sum(self.inside(block) for block in net.blocks)
        return self.stem(net) + blocks + self.head(net)


@dataclass
class _Walk:
    """The step as autograd runs it: every operation makes its results while what it reads still lives."""

    sizes: _Sizes
    net: NetShape
    sums: int | None
    """All gradients, where they live through the step; else they come one by one."""
    snapshots: list[MemorySnapshot] = field(default_factory=list)
    activations: int = 0
    temporary: int = 0
    gradients: int = 0
    done_bytes: int = 0
    """Gradients that the backward pass has finished."""

    def run(self) -> None:
        """Walk from the end of the forward pass to the end of the backward pass."""
        sizes, net = self.sizes, self.net
        last = sizes.written(net.blocks[-1].parts[-1])
        self.activations, self.gradients = sizes.kept(net), self.sums or 0
        if sizes.recomputed:  # autocast's copies live until the forward pass ends, kept or not
            copies = sum(sizes.weight_copy(conv) for block in net.blocks for conv in block.convs)
            self._at("last block, forward", copies + 3 * last - sizes.head(net))
            self._at("loss, forward", copies)
        self._head()
        self._make("average, backward", last, read=sizes.batch * net.features * sizes.wide)
        for number in reversed(range(len(net.blocks))):
            self._block(number)
        self._stem()
        self.snapshots.append(MemorySnapshot("last bucket", 0, 0, self.gradients, "none", self.done_bytes))

    def _head(self) -> None:
        """Softmax, then the classifier: its weight's gradient beside its input's."""
        sizes, features = self.sizes, self.net.features
        logits = sizes.batch * sizes.classes * FLOAT32_BYTES
        self._at("loss, backward", 2 * logits)
        self.activations -= logits
        self.temporary = sizes.batch * sizes.classes * sizes.low
        weights = features * sizes.classes
        made = sizes.batch * features * sizes.wide + weights * sizes.low
        self._make("head, backward", made, self.temporary, sizes.head(self.net) - logits)
        self._finish("head, backward", weights)
        self._add_gradient(sizes.classes)

    def _block(self, number: int) -> None:
        """A block on the way back: its parts, then its shortcut, then the sum of both gradients."""
        sizes, block, name = self.sizes, self.net.blocks[number], f"block {number}, backward"
        written, read = sizes.written(block.parts[-1]), sizes.read(block.parts[0])
        if sizes.recomputed:
            self.activations += sizes.inside(block)
            self._at(f"block {number}, recompute", written)
        # Whoever made the block's input holds it still, unless that was a pool or it waits for this block.
        held = (not self.net.pooled) if number == 0 else not sizes.recomputed
        freed = 0 if held else read
        self._make(name, written, written, saved=written)
        for index, part in reversed(list(enumerate(block.parts))):
            first, last = index == 0, index == len(block.parts) - 1
            # The residual's gradient is the same tensor as that of the last norm: it lives on.
            self._norm(name, part, read=0 if last else sizes.written(part))
            self._conv(name, part, freed if first and block.shortcut is None else 0)
            if first:
                break
            self._finish(name, part.weights)
            self._make(name, sizes.read(part), sizes.read(part), saved=sizes.read(part))
        if block.shortcut is None:
            self._make(name, read, 2 * read)
            self._finish(name, block.parts[0].weights)
            return
        self._finish(name, block.parts[0].weights)
        self._norm(name, block.shortcut, read=written)
        self._conv(name, block.shortcut, freed)
        self._make(name, read, 2 * read)
        self._finish(name, block.shortcut.weights)

    def _stem(self) -> None:
        sizes, stem, name = self.sizes, self.net.stem, "stem, backward"
        written = sizes.written(stem)
        if self.net.pooled:
            pixels = sizes.batch * self.net.blocks[0].parts[0].in_elements
            self._make(name, written, pixels * sizes.wide, saved=pixels * INT64_BYTES)
        self._make(name, written, written, saved=written)
        self._norm(name, stem, written)
        copies = sizes.weight_copy(stem) + sizes.input_copy(stem, given=FLOAT32_BYTES)
        self._make(name, stem.weights * sizes.low, written, saved=copies)
        self._finish(name, stem.weights)

    def _norm(self, name: str, conv: Conv, read: int) -> None:
        """A norm: the gradient of its input, and those of its own parameters."""
        sizes = self.sizes
        saved = sizes.written(conv) + sizes.statistics(conv)
        self._make(name, sizes.written(conv), read, saved)
        self._add_gradient(2 * conv.out_channels)

    def _conv(self, name: str, conv: Conv, freed: int) -> None:
        """A convolution: the gradients of what it read and of its weight."""
        sizes = self.sizes
        made = sizes.read(conv) + conv.weights * sizes.low
        saved = sizes.weight_copy(conv) + sizes.input_copy(conv) + freed
        self._make(name, made, sizes.written(conv), saved)

    def _at(self, name: str, extra: int) -> None:
        """Write down a moment at which ``extra`` bytes live beside what lives anyway."""
        formula = f"{self.activations} of {self.sizes.kept(self.net)} kept"
        temporary = self.temporary + extra
        self.snapshots.append(
            MemorySnapshot(name, self.activations, temporary, self.gradients, formula, self.done_bytes)
        )

    def _make(self, name: str, made: int, read: int = 0, saved: int = 0) -> None:
        """An operation: its results come to life, then the gradient that it read and what it saved die."""
        self._at(name, made)
        self.temporary += made - read
        self.activations -= saved

    def _finish(self, name: str, weights: int) -> None:
        """A weight's gradient becomes float32 and is added up, or stays as the gradient."""
        low = self.sizes.low
        if low != FLOAT32_BYTES:
            self._at(name, weights * FLOAT32_BYTES)
        self.temporary -= weights * low
        self._add_gradient(weights)
        if self.sums is not None:  # its bucket may be complete: copied to be sent while this one still lives
            self._at(name, weights * FLOAT32_BYTES)

    def _add_gradient(self, elements: int) -> None:
        self.done_bytes += elements * FLOAT32_BYTES
        if self.sums is None:
            self.gradients += elements * FLOAT32_BYTES
