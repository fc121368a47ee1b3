"""Datasets without files, for dry runs and benchmarks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.data.dataset import SampleBatch, TokenDataset
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


class ZeroDataset(TokenDataset):
    """The samples of one step, all zeros; every position is a target."""

    def __init__(self, job: Job) -> None:
        self.seq_len, self.mask = job.data.seq_len, job.data.mask
        self.shard_sample_counts = (job.train.global_batch,)

    def __len__(self) -> int:
        return self.shard_sample_counts[0]

    def read(self, indices: npt.ArrayLike) -> SampleBatch:
        """Zeros."""
        zeros = np.zeros((np.size(indices), self.seq_len), dtype=np.int64)
        return SampleBatch(zeros, zeros, zeros if self.mask == "document" else None)


class RandomTokens(ZeroDataset):
    """The samples of all steps, random tokens; every position is a target."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.shard_sample_counts = (job.train.global_batch * job.train.steps,)  # no step repeats another's
        assert isinstance(job.model, DecoderModel), "decoders read tokens"
        self._vocab_size = job.model.vocab_size

    def read(self, indices: npt.ArrayLike) -> SampleBatch:
        """Random tokens, the same at each call."""
        shape = (np.size(indices), self.seq_len)
        tokens = np.random.default_rng(0).integers(0, self._vocab_size, shape)
        return SampleBatch(tokens, tokens, None)

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """Every position."""
        return np.size(indices) * self.seq_len
