"""Scores a model on samples: summed loss, targets, and correct predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (the usual alias)
from torch import Tensor

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.models.decoder import Decoder
from meshwright.models.dtypes import AUTOCAST_DTYPES
from meshwright.models.resnet import ResNet
from meshwright.parallel.batch import Batch


@dataclass
class Score:
    """Sums over samples."""

    loss_sum: float = 0.0
    targets: int = 0
    correct: int = 0
    """Targets that are the most likely prediction: the next token, or the label."""


@torch.no_grad()
def score(model: Decoder | ResNet, batches: Iterable[Batch], precision: str = "fp32") -> Score:
    """Score a whole model in this process; logits of ``model.loss_chunk`` tokens are in memory at once.

    Args:
        model: On its device.
        batches: The samples.
        precision: Precision of the GEMMs: ``fp32``, ``bf16`` or ``fp16``; logits and loss are float32.
    """
    total = Score()
    device, low = next(model.parameters()).device, AUTOCAST_DTYPES.get(precision)
    with torch.autocast(device.type, low or torch.bfloat16, enabled=low is not None):
        for batch in batches:
            for logits, target in _iter_logits(model, batch, device):
                loss = F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="sum")
                total.loss_sum += float(loss)
                total.targets += int((target != IGNORE_INDEX).sum())
                total.correct += int((logits.argmax(-1) == target).sum())
    return total


def _iter_logits(
    model: Decoder | ResNet, batch: Batch, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of float32 logits (targets, classes) and their targets."""
    inputs, targets = batch.inputs.to(device), batch.targets.to(device).flatten()
    if isinstance(model, ResNet):
        yield model(inputs).float(), targets
        return
    segments = None if batch.segments is None else batch.segments.to(device)
    weights = None if batch.weights is None else batch.weights.to(device)
    hidden = model.norm(model.run_blocks(inputs, segments, weights)).flatten(0, 1)
    chunk = model.loss_chunk
    for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        yield model.head(part).float(), wanted
