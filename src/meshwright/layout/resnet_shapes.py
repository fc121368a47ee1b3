"""Every convolution of a ResNet with its image sizes: parameters, FLOPs and memory are counted from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.spec.model import BOTTLENECK_GROWTH, ResNetModel


@dataclass(frozen=True)
class Conv:
    """A square convolution without bias, and the norm behind it."""

    name: str
    inner: int
    """Channels that it reads."""
    outer: int
    """Channels that it writes."""
    kernel: int
    in_side: int
    """Height and width of what it reads."""
    side: int
    """Height and width of what it writes."""

    @property
    def weights(self) -> int:
        """Elements of its weight."""
        return self.outer * self.inner * self.kernel**2

    @property
    def read(self) -> int:
        """Elements that it reads of one sample."""
        return self.inner * self.in_side**2

    @property
    def written(self) -> int:
        """Elements that it writes of one sample."""
        return self.outer * self.side**2

    @property
    def forward_flops(self) -> int:
        """Of one sample: a multiplication and an addition for each weight at each pixel."""
        return 2 * self.weights * self.side**2


@dataclass(frozen=True)
class BlockShape:
    """The convolutions of a residual block, and the one beside them where the shape changes."""

    parts: tuple[Conv, ...]
    shortcut: Conv | None

    @property
    def convs(self) -> tuple[Conv, ...]:
        """All of them, in the order in which the model registers them."""
        return self.parts if self.shortcut is None else (*self.parts, self.shortcut)


@dataclass(frozen=True)
class NetShape:
    """The whole network."""

    stem: Conv
    pooled: bool
    """Whether a max-pool halves the image behind the stem."""
    blocks: tuple[BlockShape, ...]

    @property
    def features(self) -> int:
        """Channels that the classifier reads."""
        return self.blocks[-1].parts[-1].outer

    @property
    def convs(self) -> tuple[Conv, ...]:
        """All convolutions, in the order in which the model registers them."""
        return (self.stem, *(conv for block in self.blocks for conv in block.convs))


def halve(side: int) -> int:
    """What stride 2 leaves of a side: odd ones are rounded up, as the padding is half a kernel."""
    return -(-side // 2)


@functools.lru_cache(maxsize=64)
def list_convs(model: ResNetModel) -> NetShape:
    """The convolutions of a model."""
    pooled = model.stem == "imagenet"
    side = halve(model.image_size) if pooled else model.image_size
    stem = Conv("stem", model.channels, model.width, 7 if pooled else 3, model.image_size, side)
    side = halve(side) if pooled else side
    blocks: list[BlockShape] = []
    inner = model.width
    for stage, count in enumerate(model.blocks):
        for index in range(count):
            after = halve(side) if stage > 0 and index == 0 else side
            block = _block(model, f"blocks.{len(blocks)}", inner, model.width * 2**stage, side, after)
            blocks.append(block)
            inner, side = block.parts[-1].outer, after
    return NetShape(stem, pooled, tuple(blocks))


def _block(model: ResNetModel, name: str, inner: int, width: int, side: int, after: int) -> BlockShape:
    if model.bottleneck:
        outer = width * BOTTLENECK_GROWTH
        parts: tuple[Conv, ...] = (
            Conv(f"{name}.parts.0", inner, width, 1, side, side),
            Conv(f"{name}.parts.1", width, width, 3, side, after),
            Conv(f"{name}.parts.2", width, outer, 1, after, after),
        )
    else:
        outer = width
        parts = (
            Conv(f"{name}.parts.0", inner, width, 3, side, after),
            Conv(f"{name}.parts.1", width, width, 3, after, after),
        )
    # A block with a stride also doubles the width: the channels alone tell that the shape changes.
    shortcut = Conv(f"{name}.shortcut", inner, outer, 1, side, after) if inner != outer else None
    return BlockShape(parts, shortcut)


def image_flops(model: ResNetModel) -> int:
    """Forward and backward FLOPs of one image: the convolutions and the classifier, nothing else.

    The backward pass costs a product for the weight's gradient and one for the input's, each as large as the
    forward pass. Nobody asks for the gradient of the images, so the stem has no second one.
    """
    shape = list_convs(model)
    head = 2 * shape.features * model.num_classes
    rest = sum(conv.forward_flops for conv in shape.convs[1:])
    return 2 * shape.stem.forward_flops + 3 * (rest + head)
