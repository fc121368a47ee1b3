"""Every convolution of a ResNet with its image sizes: parameters, FLOPs and memory are counted from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.spec.model import BOTTLENECK_GROWTH, ResNetModel


@dataclass(frozen=True)
class Conv:
    """A square convolution without bias, and the norm behind it."""

    name: str
    in_channels: int
    """Channels that it reads."""
    out_channels: int
    """Channels that it writes."""
    kernel: int
    in_size: int
    """Height and width of what it reads."""
    out_size: int
    """Height and width of what it writes."""

    @property
    def weights(self) -> int:
        """Elements of its weight."""
        return self.out_channels * self.in_channels * self.kernel**2

    @property
    def in_elements(self) -> int:
        """Elements that it reads of one sample."""
        return self.in_channels * self.in_size**2

    @property
    def out_elements(self) -> int:
        """Elements that it writes of one sample."""
        return self.out_channels * self.out_size**2

    @property
    def forward_flops(self) -> int:
        """Of one sample: a multiplication and an addition for each weight at each pixel."""
        return 2 * self.weights * self.out_size**2


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
        return self.blocks[-1].parts[-1].out_channels

    @property
    def convs(self) -> tuple[Conv, ...]:
        """All convolutions, in the order in which the model registers them."""
        return (self.stem, *(conv for block in self.blocks for conv in block.convs))


def halve(out_size: int) -> int:
    """What stride 2 leaves of a side: odd ones are rounded up, as the padding is half a kernel."""
    return -(-out_size // 2)


@functools.lru_cache(maxsize=64)
def list_convs(model: ResNetModel) -> NetShape:
    """The convolutions of a model."""
    pooled = model.stem == "imagenet"
    out_size = halve(model.image_size) if pooled else model.image_size
    stem = Conv("stem", model.channels, model.width, 7 if pooled else 3, model.image_size, out_size)
    out_size = halve(out_size) if pooled else out_size
    blocks: list[BlockShape] = []
    in_channels = model.width
    for stage, count in enumerate(model.blocks):
        for index in range(count):
            after = halve(out_size) if stage > 0 and index == 0 else out_size
            block = _block(
                model, f"blocks.{len(blocks)}", in_channels, model.width * 2**stage, out_size, after
            )
            blocks.append(block)
            in_channels, out_size = block.parts[-1].out_channels, after
    return NetShape(stem, pooled, tuple(blocks))


def _block(
    model: ResNetModel, name: str, in_channels: int, width: int, out_size: int, after: int
) -> BlockShape:
    if model.bottleneck:
        out_channels = width * BOTTLENECK_GROWTH
        parts: tuple[Conv, ...] = (
            Conv(f"{name}.parts.0", in_channels, width, 1, out_size, out_size),
            Conv(f"{name}.parts.1", width, width, 3, out_size, after),
            Conv(f"{name}.parts.2", width, out_channels, 1, after, after),
        )
    else:
        out_channels = width
        parts = (
            Conv(f"{name}.parts.0", in_channels, width, 3, out_size, after),
            Conv(f"{name}.parts.1", width, width, 3, after, after),
        )
    # A block with a stride also doubles the width: the channels alone tell that the shape changes.
    shortcut = (
        Conv(f"{name}.shortcut", in_channels, out_channels, 1, out_size, after)
        if in_channels != out_channels
        else None
    )
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
