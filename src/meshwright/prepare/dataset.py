"""Samples from prepared data, memory-mapped.

Packing: within each shard, sample ``i`` covers tokens ``i * seq_len`` to ``i * seq_len + seq_len`` inclusive,
that is ``seq_len + 1`` tokens: the first ``seq_len`` are inputs, the last ``seq_len`` targets. Neighbours
share one token, and each token is a target once. Samples never span shards, so appending shards renumbers
nothing; what does not fill a sample at a shard's end is dropped and counted. The order of reading is the
business of ``order``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.prepare.shards import ShardEntry, ShardFolder, broken_shards
from meshwright.prepare.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

Int64s = npt.NDArray[np.int64]


class TokenDataset:
    """The samples of one split, numbered through all shards.

    Shards are mapped when they are first read. A copy sent to another process maps them there.
    """

    def __init__(self, shards: ShardFolder, split: str, seq_len: int) -> None:
        """Use :meth:`open`, which also checks that there is something to train on."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.split = split
        self.seq_len = seq_len
        self._folder = shards
        self._shards: tuple[ShardEntry, ...] = shards.index.split(split).shards
        self.shard_sample_counts: tuple[int, ...] = tuple((s.tokens - 1) // seq_len for s in self._shards)
        self._starts: Int64s = np.concatenate(([0], np.cumsum(self.shard_sample_counts))).astype(np.int64)
        self._rows: dict[int, npt.NDArray[Any]] = {}

    @classmethod
    def open(cls, folder: Path, split: str, seq_len: int) -> TokenDataset:
        """Open a split of a prepared folder.

        Args:
            folder: A folder that ``meshwright prepare`` wrote.
            split: ``train`` or ``eval``.
            seq_len: Inputs of a sample.

        Raises:
            UserError: The folder is broken, or ``train`` has less than one sample. ``eval`` may have none:
                then :attr:`is_empty` is true, and the caller says that there is no evaluation.
        """
        dataset = cls(ShardFolder.open(folder), split, seq_len)
        if split == "train" and dataset.is_empty:
            longest = dataset.longest_sequence
            has = f"the longest shard of {folder} has {longest + 1}" if longest else f"{folder} has none"
            raise UserError(
                Problem(
                    code="data-corpus-short",
                    path="data.seq_len",
                    value=seq_len,
                    rule=f"needs {seq_len + 1} tokens in one shard, and {has}",
                    fix=f"Use data.seq_len={longest} or less, or add text" if longest else "Add text",
                )
            )
        return dataset

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Int64s:
        """The ``seq_len + 1`` tokens of one sample."""
        shard, row = self._locate(index)
        sample: Int64s = self._map_rows(shard)[row].astype(np.int64)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": {}}

    def read(self, indices: npt.ArrayLike) -> Int64s:
        """Many samples at once.

        Args:
            indices: Sample numbers, in any order, repeats allowed.

        Returns:
            An array of shape ``(n, seq_len + 1)``.
        """
        wanted: Int64s = np.asarray(indices, dtype=np.int64).reshape(-1)
        out: Int64s = np.empty((wanted.size, self.seq_len + 1), dtype=np.int64)
        if wanted.size == 0:
            return out
        if int(wanted.min()) < 0 or int(wanted.max()) >= len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} asked of {len(self)}")
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shards):
            chosen = shards == shard
            out[chosen] = self._map_rows(int(shard))[wanted[chosen] - self._starts[shard]]
        return out

    def document_starts(self, index: int) -> Int64s:
        """Where documents start in a sample, as offsets 0 to ``seq_len``.

        A document mask needs these. A sample inside a long document has none; the offset ``seq_len`` is only
        a target.
        """
        shard, row = self._locate(index)
        begin = row * self.seq_len
        starts = self._folder.map_documents(self._shards[shard])
        # Same dtype as the file: mixed integers would make NumPy convert the whole file to float64.
        low, high = np.searchsorted(starts, np.asarray([begin, begin + self.seq_len + 1], dtype=np.uint64))
        return starts[low:high].astype(np.int64) - begin

    def target_count(self, index: int) -> int:
        """Tokens of a sample that count in the loss: all targets, as nothing is masked here."""
        self._locate(index)
        return self.seq_len

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """The same for many samples together, without reading them."""
        return int(np.size(np.asarray(indices))) * self.seq_len

    @property
    def is_empty(self) -> bool:
        """Whether there is not one sample, which ``eval`` may be."""
        return len(self) == 0

    @property
    def longest_sequence(self) -> int:
        """The largest ``seq_len`` that would give a sample; 0 if none does."""
        return max((shard.tokens - 1 for shard in self._shards), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the split, ends of documents included."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the shards' ends that fill no sample."""
        counted = zip(self._shards, self.shard_sample_counts, strict=True)
        return sum(s.tokens - (count * self.seq_len + 1 if count else 0) for s, count in counted)

    @property
    def vocab_size(self) -> int:
        """All tokens are below it."""
        return self._folder.index.tokenizer.vocab_size

    @property
    def end_of_document(self) -> int:
        """The token that follows each document."""
        return self._folder.index.tokenizer.end_of_document

    @property
    def tokenizer_folder(self) -> Path:
        """The folder that has ``tokenizer.json``."""
        return self._folder.folder

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data.

        Raises:
            UserError: It is missing, or not the one that the index names.
        """
        tokenizer = load_tokenizer(self.tokenizer_folder / TOKENIZER_FILE)
        if tokenizer.fingerprint() != self._folder.index.tokenizer.sha256:
            rule = "is not the tokenizer that made these shards: its fingerprint differs from the index"
            raise broken_shards(self.tokenizer_folder / TOKENIZER_FILE, rule)
        return tokenizer

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} asked of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, int(index - self._starts[shard])

    def _map_rows(self, shard: int) -> npt.NDArray[Any]:
        """The samples of a shard as the rows of a view; no copy is made."""
        if shard not in self._rows:
            tokens = self._folder.map_tokens(self._shards[shard])
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self.seq_len + 1)
            self._rows[shard] = windows[:: self.seq_len]
        return self._rows[shard]
