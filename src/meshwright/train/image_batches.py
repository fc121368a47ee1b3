"""Images and labels in micro-batches of one size; samples are assigned to ranks as in ``batches``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.data.dataset import IGNORE_INDEX
from meshwright.data.images import ImageDataset, image_shape, open_images
from meshwright.parallel.batch import Batch
from meshwright.spec.job import SYNTHETIC_IMAGES, Job
from meshwright.spec.model import ResNetModel
from meshwright.train.batches import Samples, split_into_micro_batches


@dataclass(frozen=True)
class ImageBatcher:
    """Splits samples of images into the micro-batches of this rank."""

    dataset: ImageDataset
    rank: int
    ranks: int
    micro_batch: int

    def micro_batches(self, samples: Samples, min_samples: int = 0) -> Iterator[Batch]:
        """Images (micro_batch, C, H, W) and labels (micro_batch).

        A rank with fewer samples is padded with black images, whose labels are ignored.
        """
        shape = self.dataset.shape
        for part in split_into_micro_batches(samples, self.rank, self.ranks, self.micro_batch, min_samples):
            images = torch.zeros((self.micro_batch, shape.channels, shape.side, shape.side))
            labels = torch.full((self.micro_batch,), IGNORE_INDEX, dtype=torch.int64)
            if len(part):
                pixels, classes = self.dataset.read(part)
                images[: len(part)] = torch.from_numpy(pixels)
                labels[: len(part)] = torch.from_numpy(classes)
            yield Batch(images, labels)

    def count_targets(self, samples: Samples) -> int:
        """Labels of all ranks: every rank computes the divisor of the loss without a collective."""
        return self.dataset.count_targets(samples)


def open_image_batches(
    job: Job, model: ResNetModel, folder: Path, rank: int
) -> tuple[ImageBatcher, ImageBatcher, str]:
    """The images of a rank to train and evaluate on, and the checksum of the data."""
    shape = image_shape(model)
    path = job.data.path if job.data.path == SYNTHETIC_IMAGES else str(folder)

    def batcher(split: str) -> ImageBatcher:
        dataset = open_images(path, split, shape, job.data.eval_fraction)
        return ImageBatcher(dataset, rank, job.layout.data_degree, job.layout.micro_batch or 1)

    train = batcher("train")
    return train, batcher("eval"), train.dataset.sha256
