"""A residual network for images (He et al. 2015), the stride in a bottleneck's 3x3 convolution.

Images are normalised float32 (``data.images`` maps bytes to -1..1). ReLU and the residual add work in place:
a norm saves its input and not its output, so the backward pass loses nothing.

Shape suffixes: B samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor, nn

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.activation_checkpointing import ActivationCheckpointing
from meshwright.spec.layout import Recompute
from meshwright.spec.model import BOTTLENECK_GROWTH, ResNetModel


class GroupNorm(nn.Module):
    """Group norm."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.groups, self.eps = groups, eps

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise."""
        return F.group_norm(x_BCHW, self.groups, self.weight, self.bias, self.eps)


class BatchNorm(nn.Module):
    """Batch norm over the micro-batch; with running statistics in evaluation.

    Torch's also counts batches, which only a momentum of None needs. Without the count all buffers are
    float32 and share one collective.
    """

    MOMENTUM = 0.1

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps = eps

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise."""
        return F.batch_norm(
            x_BCHW,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.MOMENTUM,
            self.eps,
        )


def build_norm(model: ResNetModel, channels: int) -> GroupNorm | BatchNorm:
    """The model's kind of norm."""
    if model.norm == "batch":
        return BatchNorm(channels, model.norm_eps)
    return GroupNorm(channels, model.groups, model.norm_eps)


class ConvNorm(nn.Module):
    """A convolution without bias, then a norm; the image's size is divided by the stride."""

    def __init__(self, model: ResNetModel, inner: int, outer: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, size, stride, padding=size // 2, bias=False)
        self.norm = build_norm(model, outer)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve, then normalise."""
        return self.norm(self.conv(x_BCHW))


class Block(nn.Module):
    """A residual block of two or three convolutions."""

    def __init__(
        self, model: ResNetModel, inner: int, width: int, stride: int, recompute: Recompute = "none"
    ) -> None:
        super().__init__()
        self.checkpointing = ActivationCheckpointing(recompute)
        if model.bottleneck:
            outer = width * BOTTLENECK_GROWTH
            parts = [
                ConvNorm(model, inner, width, 1),
                ConvNorm(model, width, width, 3, stride),
                ConvNorm(model, width, outer, 1),
            ]
        else:
            outer = width
            parts = [ConvNorm(model, inner, width, 3, stride), ConvNorm(model, width, width, 3)]
        self.parts = nn.ModuleList(parts)
        # A block with a stride also doubles the width.
        self.shortcut = ConvNorm(model, inner, outer, 1, stride) if inner != outer else None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The block, with activation checkpointing."""
        return self.checkpointing.run(self._compute, x_BCHW)

    def _compute(self, x_BCHW: Tensor) -> Tensor:
        residual = x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)
        for index, part in enumerate(self.parts):
            x_BCHW = part(x_BCHW)
            if index < len(self.parts) - 1:
                x_BCHW = F.relu_(x_BCHW)
        return F.relu_(x_BCHW.add_(residual))


class ResNet(nn.Module):
    """Images in; logits, or the summed loss if labels are given, out."""

    def __init__(self, model: ResNetModel, recompute: Recompute = "none") -> None:
        """Build it with uninitialised weights.

        Args:
            model: Its shape.
            recompute: Activation checkpointing of each block: ``none`` or ``full``.
        """
        super().__init__()
        imagenet = model.stem == "imagenet"
        self.stem = ConvNorm(model, model.channels, model.width, *((7, 2) if imagenet else (3, 1)))
        self.pooled = imagenet
        blocks: list[Block] = []
        inner = model.width
        for stage, count in enumerate(model.blocks):
            width = model.width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(model, inner, width, stride, recompute))
                inner = width * (BOTTLENECK_GROWTH if model.bottleneck else 1)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inner, model.num_classes)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """Logits (B, K), or the loss **summed** over the labels that are not ``IGNORE_INDEX``.

        The caller divides by the number of labels in the global batch.
        """
        x_BCHW = F.relu_(self.stem(images_BCHW))
        if self.pooled:
            x_BCHW = F.max_pool2d(x_BCHW, 3, stride=2, padding=1)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits_BK = self.head(x_BCHW.mean((2, 3))).float()
        if labels_B is None:
            return logits_BK
        return F.cross_entropy(logits_BK, labels_B.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
