"""The convolutions of a ResNet with their sizes, for parameters, FLOPs and memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from meshwright.spec.model import BOTTLENECK_GROWTH, ResNetModel


@dataclass(frozen=True)
class Conv:
    """A square convolution without bias, and the norm after it."""

    name: str
    in_channels: int
    """Input channels."""
    out_channels: int
    """Output channels."""
    kernel: int
    in_size: int
    """Height and width of the input."""
    out_size: int
    """Height and width of the output."""

    @property
    def weights(self) -> int:
        """Elements of the weight."""
        return self.out_channels * self.in_channels * self.kernel**2

    @property
    def in_elements(self) -> int:
        """Input elements per sample."""
        return self.in_channels * self.in_size**2

    @property
    def out_elements(self) -> int:
        """Output elements per sample."""
        return self.out_channels * self.out_size**2

    @property
    def forward_flops(self) -> int:
        """Forward FLOPs per sample: 2 per weight and output pixel."""
        return 2 * self.weights * self.out_size**2


@dataclass(frozen=True)
class BlockShape:
    """The convolutions of a residual block, and its shortcut convolution where the shape changes."""

    parts: tuple[Conv, ...]
    shortcut: Conv | None

    @property
    def convs(self) -> tuple[Conv, ...]:
        """All convolutions, in registration order."""
        return self.parts if self.shortcut is None else (*self.parts, self.shortcut)


@dataclass(frozen=True)
class NetShape:
    """The whole network."""

    stem: Conv
    pooled: bool
    """Whether a max-pool halves the image after the stem."""
    blocks: tuple[BlockShape, ...]

    @property
    def features(self) -> int:
        """Input features of the classifier."""
        return self.blocks[-1].parts[-1].out_channels

    @property
    def convs(self) -> tuple[Conv, ...]:
        """All convolutions, in registration order."""
        return (self.stem, *(conv for block in self.blocks for conv in block.convs))


def halve(out_size: int) -> int:
    """Output size of stride 2: rounded up, as the padding is half a kernel."""
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
    # A block with a stride also changes the channels, so comparing channels is enough.
    shortcut = (
        Conv(f"{name}.shortcut", in_channels, out_channels, 1, out_size, after)
        if in_channels != out_channels
        else None
    )
    return BlockShape(parts, shortcut)


def image_flops(model: ResNetModel) -> int:
    """Forward and backward FLOPs per image, of the convolutions and the classifier.

    The backward pass computes the weight gradient and the input gradient, each as expensive as the forward
    pass. The stem needs no input gradient.
    """
    shape = list_convs(model)
    head = 2 * shape.features * model.num_classes
    rest = sum(conv.forward_flops for conv in shape.convs[1:])
    return 2 * shape.stem.forward_flops + 3 * (rest + head)
