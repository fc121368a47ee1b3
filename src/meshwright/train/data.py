"""The data of one rank: batches to train and evaluate on, in the order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.data.dataset import TokenDataset
from meshwright.data.growth import data_sha256, identify_sources
from meshwright.data.identity import SourceIdentity
from meshwright.data.images import open_images
from meshwright.data.mixture import MixtureOrder, read_mixture
from meshwright.data.order import SampleOrder
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.parallel.context import ContextParallel
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.model import ResNetModel
from meshwright.train.batches import Batcher, BatchPrefetcher, SliceSource
from meshwright.train.image_batches import ImageBatcher, open_image_batches

OpenSplit = Callable[[str], TokenDataset]
"""Opens the samples of ``train`` or ``eval``."""


@dataclass(frozen=True)
class TrainData:
    """The training and evaluation data of one rank."""

    train: Batcher | ImageBatcher
    eval: Batcher | ImageBatcher
    eval_sets: dict[str, Batcher | ImageBatcher]
    """The sets of ``data.eval``, by name."""
    order: SampleOrder | MixtureOrder
    prefetcher: BatchPrefetcher
    sha256: str
    """Checksum of the index, which holds the checksums of the shards; of images, see ``data.images``."""
    sources: dict[str, SourceIdentity]
    """The shards of each source; empty for images and for data that come from elsewhere."""
    tokenizer: Path | None
    """The tokenizer file; None for images and for data that come from elsewhere."""


def first_samples(held_out: Batcher | ImageBatcher, count: int) -> npt.NDArray[np.int64]:
    """The held-out samples of an evaluation, at most ``count``, always the same."""
    if isinstance(held_out, Batcher):
        return held_out.dataset.first_samples(count)
    return np.arange(min(len(held_out.dataset), count))


def open_data(
    job: Job,
    folder: Path,
    mesh: Mesh,
    context: ContextParallel | None,
    open_split: OpenSplit | None,
    eval_sets: Mapping[str, str] | None = None,
) -> TrainData:
    """Open the data of a rank.

    Args:
        job: The settled job.
        folder: Folder of the prepared data.
        mesh: Mesh of the rank.
        context: The positions that this rank reads, with ``layout.cp > 1``.
        open_split: Replaces the data in the folder.
        eval_sets: Folder of each set of ``data.eval``, by name.
    """
    train, held_out, sha256 = _open_batchers(job, folder, mesh, context, open_split)
    order: SampleOrder | MixtureOrder
    if isinstance(train, Batcher):
        order = train.dataset.order(job.train.seed)
    else:
        order = SampleOrder(train.dataset.shard_sample_counts, job.train.seed)
    source = SliceSource(train) if isinstance(train, Batcher) and job.layout.backup_replicas else train
    prefetcher = BatchPrefetcher(order, source, job.train.global_batch, mesh.device)
    tokenizer, sources = None, {}
    if isinstance(train, Batcher) and open_split is None:
        tokenizer = Path(read_mixture(folder)[0].folder) / TOKENIZER_FILE
        sources = identify_sources(folder, train.dataset.source_counts)
    sets = {name: _open_set(job, where, held_out) for name, where in (eval_sets or {}).items()}
    return TrainData(train, held_out, sets, order, prefetcher, sha256, sources, tokenizer)


def _open_set(job: Job, folder: str, like: Batcher | ImageBatcher) -> Batcher | ImageBatcher:
    """A further held-out set, split over the ranks like the held-out split of the data."""
    if isinstance(like, Batcher):
        return replace(like, dataset=TokenDataset.open_set(Path(folder), job.data))
    images = open_images(folder, "eval", like.dataset.shape, job.data.eval_fraction)
    return replace(like, dataset=images)


def _open_batchers(
    job: Job, folder: Path, mesh: Mesh, context: ContextParallel | None, open_split: OpenSplit | None
) -> tuple[Batcher, Batcher, str] | tuple[ImageBatcher, ImageBatcher, str]:
    if isinstance(job.model, ResNetModel):
        return open_image_batches(job, job.model, folder, mesh.dp_rank)
    assert job.layout.micro_batch is not None, "a plan settles the micro-batch"
    rows = (job.data.seq_len, job.data.mask, job.data.prompt_masking)
    sample_weight = 1 / job.train.global_batch if job.model.num_experts else None

    degree, micro_batch = job.layout.data_degree, job.layout.micro_batch or 1

    def batcher(split: str, rank: int) -> Batcher:
        dataset = open_split(split) if open_split else TokenDataset.open(folder, split, *rows)
        return Batcher(dataset, rank, degree, micro_batch, context, sample_weight)

    sha256 = "" if open_split else data_sha256(folder)
    # Backup replicas train on samples of another replica, and evaluate none.
    return batcher("train", mesh.dp_rank % degree), batcher("eval", mesh.dp_rank), sha256
