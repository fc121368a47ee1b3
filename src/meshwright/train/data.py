"""The data of one rank: batches to train and evaluate on, in the order of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.data.dataset import TokenDataset
from meshwright.data.epochs import CorpusState
from meshwright.data.growth import identify_corpus
from meshwright.data.images import open_images
from meshwright.data.mixture import read_mixture
from meshwright.data.order import Order, SampleOrder
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
    order: Order
    prefetcher: BatchPrefetcher
    corpus: CorpusState
    """What the folder has, and the epochs so far."""
    tokenizer: Path | None
    """The tokenizer file; None for images and for data that come from elsewhere."""
    reopened: Callable[[CorpusState], TrainData]
    """The same folder with more or fewer documents, or other epochs."""


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
    corpus: CorpusState | None = None,
) -> TrainData:
    """Open the data of a rank.

    Args:
        job: The settled job.
        folder: Folder of the prepared data.
        mesh: Mesh of the rank.
        context: The positions that this rank reads, with ``layout.cp > 1``.
        open_split: Replaces the data in the folder.
        eval_sets: Folder of each set of ``data.eval``, by name.
        corpus: What is read of the folder; without it everything.
    """
    known = None if open_split else corpus
    train, held_out, sha256 = _open_batchers(job, folder, mesh, context, open_split, known)
    order: Order
    if isinstance(train, Batcher):
        if known is None:
            known = CorpusState() if open_split else identify_corpus(folder, train.dataset)
        order = train.dataset.order(job.train.seed, known.epochs)
    else:
        known = CorpusState(sha256)
        order = SampleOrder(train.dataset.shard_sample_counts, job.train.seed)
    source = SliceSource(train) if isinstance(train, Batcher) and job.layout.backup_replicas else train
    prefetcher = BatchPrefetcher(order, source, job.train.global_batch, mesh.device)
    tokenizer = None
    if isinstance(train, Batcher) and open_split is None:
        tokenizer = Path(read_mixture(folder)[0].folder) / TOKENIZER_FILE
    sets = {name: _open_set(job, where, held_out) for name, where in (eval_sets or {}).items()}

    def reopened(other: CorpusState) -> TrainData:
        return open_data(job, folder, mesh, context, open_split, eval_sets, other)

    return TrainData(train, held_out, sets, order, prefetcher, known, tokenizer, reopened)


def _open_set(job: Job, folder: str, like: Batcher | ImageBatcher) -> Batcher | ImageBatcher:
    """A further held-out set, split over the ranks like the held-out split of the data."""
    if isinstance(like, Batcher):
        return replace(like, dataset=TokenDataset.open_set(Path(folder), job.data))
    images = open_images(folder, "eval", like.dataset.shape, job.data.eval_fraction)
    return replace(like, dataset=images)


def _open_batchers(
    job: Job,
    folder: Path,
    mesh: Mesh,
    context: ContextParallel | None,
    open_split: OpenSplit | None,
    corpus: CorpusState | None,
) -> tuple[Batcher, Batcher, str] | tuple[ImageBatcher, ImageBatcher, str]:
    if isinstance(job.model, ResNetModel):
        return open_image_batches(job, job.model, folder, mesh.dp_rank)
    assert job.layout.micro_batch is not None, "a plan settles the micro-batch"
    known = None if corpus is None else corpus.sources
    rows = (job.data.seq_len, job.data.mask, job.data.prompt_masking, known)
    sample_weight = 1 / job.train.global_batch if job.model.num_experts else None

    degree, micro_batch = job.layout.data_degree, job.layout.micro_batch or 1

    def batcher(split: str, rank: int) -> Batcher:
        dataset = open_split(split) if open_split else TokenDataset.open(folder, split, *rows)
        return Batcher(dataset, rank, degree, micro_batch, context, sample_weight)

    # Backup replicas train on samples of another replica, and evaluate none.
    return batcher("train", mesh.dp_rank % degree), batcher("eval", mesh.dp_rank), ""
