"""Walks a ResNet's eager step, operator by operator.

With B images per micro-batch, e bytes per element (2 under bf16 and fp16, else 4) and N = B x channels x
height x width of a convolution's output, each convolution with its norm and ReLU saves on CPU::

    N e (input of the norm) + N e (ReLU output, input of the next convolution) + the norm's statistics

and under bf16 and fp16 a copy of its weight. The norm before a residual add saves N e, the add N e more. A
GroupNorm's statistics are 2 x B x groups x 4, a BatchNorm's 2 x channels x 4. A max-pool saves the 8-byte
index of each output pixel. ReLU and the add are in place and hold nothing beside their input.

On GPUs autocast computes GroupNorm in float32: tensors of norms and ReLUs then have 4 bytes, and each
convolution saves a 16-bit copy of its input. Workspaces of the convolution library are not counted.

Activation checkpointing ``full`` saves the input of each block; one whole block is live while its backward
runs.

On CPU a micro-batch is read while the previous one is live: two batches beside the gradients. That is the
peak where the activations of a net are smaller than its images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    INT64_BYTES,
    Parameter,
    count_statistics,
    operand_bytes,
)
from meshwright.layout.resnet_shapes import BlockShape, Conv, NetShape, list_convs
from meshwright.plan.contract import Line
from meshwright.plan.memory.snapshots import StepMemory
from meshwright.plan.memory.walker import StepWalker
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel


def walk_resnet(
    job: Job, model: ResNetModel, parameters: Sequence[Parameter], micro_batch: int, persistent_grads: bool
) -> StepMemory:
    """The step of a ResNet.

    Args:
        job: With its layout settled.
        model: The job's model.
        parameters: Parameters of the model.
        micro_batch: Samples of one forward pass.
        persistent_grads: Whether gradients live through the whole step (DDP's buckets, accumulation).
    """
    sizes, net = _Sizes.of(job, model, micro_batch), list_convs(model)
    all_grads = sum(p.count for p in parameters) * FLOAT32_BYTES
    walker = StepWalker(sizes.saved(net), gradients=all_grads if persistent_grads else 0)
    _ResNetWalk(walker, sizes, net, persistent_grads).run()
    left = (walker.activations, walker.temporary, walker.gradients)
    assert left == (0, 0, all_grads), f"the walk through backward ends with {left}"
    pixels = model.channels * model.image_size**2
    batch = micro_batch * (pixels * FLOAT32_BYTES + INT64_BYTES)
    buffers = [Line("batch", batch, f"{micro_batch} x ({pixels} pixels x 4 + 8 (label))")]
    samples = -(-job.train.global_batch // job.layout.data_degree)
    if job.cluster.device == "cpu" and samples > micro_batch:
        walker.ready_grads = 0  # between micro-batches no bucket is being reduced
        walker.snapshot("next micro-batch", "none", temporary=batch)
    if statistics := count_statistics(model):
        buffers.append(Line("running statistics", statistics * FLOAT32_BYTES, f"{statistics} x 4"))
    return StepMemory(
        snapshots=tuple(walker.snapshots),
        buffers=tuple(buffers),
        activation_bytes=sizes.saved(net),
        touched_bytes=replace(sizes, recompute=False).saved(net),
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one micro-batch's tensors."""

    batch: int
    classes: int
    elem: int
    """Bytes per element of a convolution's input and output: 2 under bf16 and fp16."""
    norm_elem: int
    """Bytes per element of a norm's or ReLU's input and output."""
    groups: int
    """Groups of a GroupNorm; 0 for BatchNorm."""
    recompute: bool

    @classmethod
    def of(cls, job: Job, model: ResNetModel, micro_batch: int) -> _Sizes:
        elem = operand_bytes(job.train.precision)
        norm_elem = FLOAT32_BYTES if job.cluster.device == "cuda" and model.norm == "group" else elem
        groups = model.groups if model.norm == "group" else 0
        recompute = job.layout.recompute == "full"
        return cls(micro_batch, model.num_classes, elem, norm_elem, groups, recompute)

    def input(self, conv: Conv) -> int:
        """A convolution's input, in the type of its neighbours."""
        return self.batch * conv.in_elements * self.norm_elem

    def output(self, conv: Conv) -> int:
        """A convolution's output as the norm reads it; the norm's and ReLU's output are as large."""
        return self.batch * conv.out_elements * self.norm_elem

    def statistics(self, conv: Conv) -> int:
        """Mean and deviation that a norm saves."""
        return 2 * (self.batch * self.groups or conv.out_channels) * FLOAT32_BYTES

    def weight_copy(self, conv: Conv) -> int:
        """The 16-bit copy of a weight."""
        return conv.weights * self.elem if self.elem != FLOAT32_BYTES else 0

    def input_copy(self, conv: Conv, given: int | None = None) -> int:
        """A convolution's input cast to 16 bits; 0 if it has 16 bits already."""
        return self.batch * conv.in_elements * self.elem if self.elem != (given or self.norm_elem) else 0

    def conv(self, conv: Conv) -> int:
        """Saved by a convolution and its norm: the norm's input, statistics, copies."""
        copies = self.weight_copy(conv) + self.input_copy(conv)
        return self.output(conv) + self.statistics(conv) + copies

    def block(self, block: BlockShape) -> int:
        """Saved by a block, its output included and its input not."""
        return sum(self.conv(conv) for conv in block.convs) + sum(self.output(p) for p in block.parts)

    def stem(self, net: NetShape) -> int:
        """Saved by the stem, its output included."""
        stem = net.stem
        saved = self.output(stem) * 2 + self.statistics(stem) + self.weight_copy(stem)
        return saved + self.input_copy(stem, given=FLOAT32_BYTES) + self.pool(net)

    def pool(self, net: NetShape) -> int:
        """The pooled image and the index of each of its pixels."""
        pixels = self.batch * net.blocks[0].parts[0].in_elements if net.pooled else 0
        return pixels * (self.norm_elem + INT64_BYTES)

    def head(self, net: NetShape) -> int:
        """Saved by the classifier and the loss."""
        copies = net.features * (self.classes + (self.norm_elem != self.elem) * self.batch)
        low = copies * self.elem if self.elem != FLOAT32_BYTES else 0
        return self.batch * (net.features * self.norm_elem + self.classes * FLOAT32_BYTES) + low

    def saved(self, net: NetShape) -> int:
        """All activations saved for backward."""
        if self.recompute:  # the input of each block: outputs of the stem and of all blocks but the last
            blocks = sum(self.output(block.parts[-1]) for block in net.blocks[:-1])
        else:
            blocks = sum(self.block(block) for block in net.blocks)
        return self.stem(net) + blocks + self.head(net)


@dataclass
class _ResNetWalk:
    """Backward as autograd runs it: every operator allocates its results while its inputs are live."""

    walker: StepWalker
    sizes: _Sizes
    net: NetShape
    persistent_grads: bool
    saved: int = field(init=False)

    def __post_init__(self) -> None:
        self.saved = self.walker.activations

    def run(self) -> None:
        """Walk from the end of forward to the end of backward."""
        sizes, net = self.sizes, self.net
        last = sizes.output(net.blocks[-1].parts[-1])
        if sizes.recompute:  # autocast keeps its weight copies until forward ends
            copies = sum(sizes.weight_copy(conv) for block in net.blocks for conv in block.convs)
            self._snapshot("last block, forward", copies + 3 * last - sizes.head(net))
            self._snapshot("loss, forward", copies)
        self._head()
        self._operator("average, backward", last, reads=sizes.batch * net.features * sizes.norm_elem)
        for number in reversed(range(len(net.blocks))):
            self._block(number)
        self._stem()
        self.walker.snapshot("last bucket", "none")

    def _head(self) -> None:
        """Softmax, then the classifier: its weight gradient beside its input gradient."""
        sizes, features = self.sizes, self.net.features
        logits = sizes.batch * sizes.classes * FLOAT32_BYTES
        self._snapshot("loss, backward", 2 * logits)
        grad = sizes.batch * sizes.classes * sizes.elem
        self.walker.free(activations=logits)
        self.walker.alloc(temporary=grad)
        weights = features * sizes.classes
        made = sizes.batch * features * sizes.norm_elem + weights * sizes.elem
        self._operator("head, backward", made, grad, sizes.head(self.net) - logits)
        self._weight_grad("head, backward", weights)
        self._add_gradient(sizes.classes)

    def _block(self, number: int) -> None:
        """A block's backward: its convolutions, its shortcut, the sum of both gradients."""
        sizes, block, name = self.sizes, self.net.blocks[number], f"block {number}, backward"
        output, input_ = sizes.output(block.parts[-1]), sizes.input(block.parts[0])
        if sizes.recompute:
            self.walker.alloc(activations=sizes.block(block))
            self._snapshot(f"block {number}, recompute", output)
        # The operator before the block still holds the block's input, unless it is a pool or a checkpoint.
        held = (not self.net.pooled) if number == 0 else not sizes.recompute
        freed = 0 if held else input_
        self._operator(name, output, output, saved=output)
        for index, part in reversed(list(enumerate(block.parts))):
            first, last = index == 0, index == len(block.parts) - 1
            # The residual's gradient is the same tensor as the last norm's: it stays live.
            self._norm(name, part, reads=0 if last else sizes.output(part))
            self._conv(name, part, freed if first and block.shortcut is None else 0)
            if first:
                break
            self._weight_grad(name, part.weights)
            self._operator(name, sizes.input(part), sizes.input(part), saved=sizes.input(part))
        if block.shortcut is None:
            self._operator(name, input_, 2 * input_)
            self._weight_grad(name, block.parts[0].weights)
            return
        self._weight_grad(name, block.parts[0].weights)
        self._norm(name, block.shortcut, reads=output)
        self._conv(name, block.shortcut, freed)
        self._operator(name, input_, 2 * input_)
        self._weight_grad(name, block.shortcut.weights)

    def _stem(self) -> None:
        sizes, stem, name = self.sizes, self.net.stem, "stem, backward"
        output = sizes.output(stem)
        if self.net.pooled:
            pixels = sizes.batch * self.net.blocks[0].parts[0].in_elements
            self._operator(name, output, pixels * sizes.norm_elem, saved=pixels * INT64_BYTES)
        self._operator(name, output, output, saved=output)
        self._norm(name, stem, output)
        copies = sizes.weight_copy(stem) + sizes.input_copy(stem, given=FLOAT32_BYTES)
        self._operator(name, stem.weights * sizes.elem, output, saved=copies)
        self._weight_grad(name, stem.weights)

    def _norm(self, name: str, conv: Conv, reads: int) -> None:
        """A norm: the gradients of its input and of its parameters."""
        sizes = self.sizes
        self._operator(name, sizes.output(conv), reads, sizes.output(conv) + sizes.statistics(conv))
        self._add_gradient(2 * conv.out_channels)

    def _conv(self, name: str, conv: Conv, freed: int) -> None:
        """A convolution: the gradients of its input and of its weight."""
        sizes = self.sizes
        made = sizes.input(conv) + conv.weights * sizes.elem
        saved = sizes.weight_copy(conv) + sizes.input_copy(conv) + freed
        self._operator(name, made, sizes.output(conv), saved)

    def _snapshot(self, name: str, temporary: int) -> None:
        formula = f"{self.walker.activations} of {self.saved} saved"
        self.walker.snapshot(name, formula, temporary=temporary)

    def _operator(self, name: str, made: int, reads: int = 0, saved: int = 0) -> None:
        """An operator: allocates its results, then frees the gradient it read and what it saved."""
        self._snapshot(name, made)
        self.walker.alloc(temporary=made)
        self.walker.free(temporary=reads, activations=saved)

    def _weight_grad(self, name: str, weights: int) -> None:
        """A weight gradient is cast to float32 and accumulated, or kept as the gradient."""
        elem = self.sizes.elem
        if elem != FLOAT32_BYTES:
            self._snapshot(name, weights * FLOAT32_BYTES)
        self.walker.free(temporary=weights * elem)
        self._add_gradient(weights)
        if self.persistent_grads:  # a ready bucket is copied for its reduction while this one is live
            self._snapshot(name, weights * FLOAT32_BYTES)

    def _add_gradient(self, elements: int) -> None:
        self.walker.ready_grads += elements * FLOAT32_BYTES
        if not self.persistent_grads:
            self.walker.alloc(gradients=elements * FLOAT32_BYTES)
