"""Samples from prepared data, memory-mapped: a sample is one row of a packing (see ``packing``).

A row has tokens and their targets, and for ``mask="document"`` also the number of each position's document
within the row, so that attention and positions can start anew in each of them. A target that does not count
in the loss (padding, or a prompt where prompts are masked) is ``IGNORE_INDEX``. The order is left to
``order``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.data.packing import ContiguousPacking, DocumentPacking, Packing, RowPieces
from meshwright.data.shards import ShardEntry, ShardFolder, broken_shards
from meshwright.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer

IGNORE_INDEX = -100
"""A target that carries no loss: padding, a masked prompt, a zero-weight sample."""

Int64s = npt.NDArray[np.int64]
Mask = Literal["causal", "document"]

_CACHED_PACKINGS = 4
"""Shards whose packing is in memory; samples are read shard by shard, so few are in use at a time."""


@dataclass(frozen=True)
class SampleBatch:
    """Samples, each array of shape ``(n, seq_len)``."""

    tokens: Int64s
    targets: Int64s
    """The token after each, or ``IGNORE_INDEX``."""
    segments: Int64s | None
    """For ``mask="document"``: number of the document within the row, from 0; padding has the last number."""


class TokenDataset:
    """The samples of one split, numbered through all shards.

    A shard is mapped when it is first read and stays so until another one is: samples come from one after the
    other, and mapping a file takes as long as reading a few of them. A copy in another process maps there.
    """

    def __init__(
        self,
        shards: ShardFolder,
        split: str,
        seq_len: int,
        mask: Mask = "causal",
        prompt_masking: bool = False,
    ) -> None:
        """Use :meth:`open`, which also checks that there is something to train on."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.split = split
        self.seq_len = seq_len
        self.mask = mask
        self.prompt_masking = prompt_masking
        self._folder = shards
        self._shards: tuple[ShardEntry, ...] = shards.index.split(split).shards
        self._packings: dict[int, Packing] = {}
        self._targets: dict[int, Int64s] = {}
        self._tokens: tuple[int, npt.NDArray[Any]] | None = None
        self.shard_sample_counts: tuple[int, ...] = tuple(
            self._pack(s).rows for s in range(len(self._shards))
        )
        self._starts: Int64s = np.concatenate(([0], np.cumsum(self.shard_sample_counts))).astype(np.int64)

    @classmethod
    def open(
        cls,
        folder: Path,
        split: str,
        seq_len: int,
        mask: Mask = "causal",
        prompt_masking: bool = False,
    ) -> TokenDataset:
        """Open a split of a prepared folder.

        Args:
            folder: A folder that ``meshwright prepare`` wrote.
            split: ``train`` or ``eval``.
            seq_len: Positions of a sample.
            mask: ``causal`` for samples that run on over documents, ``document`` for whole documents in rows.
            prompt_masking: Whether targets in prompts are ignored.

        Raises:
            UserError: The folder is broken, has no marks where prompts are to be masked, or ``train`` has no
                sample or no target. ``eval`` may have none: the caller then says that there is no evaluation.
        """
        opened = ShardFolder.open(folder)
        if prompt_masking and any(s.loss_mask_file is None for s in opened.index.split(split).shards):
            raise UserError(no_prompts(f"{folder} was prepared without a template"))
        dataset = cls(opened, split, seq_len, mask, prompt_masking)
        if split != "train":
            return dataset
        if dataset.is_empty:
            raise UserError(dataset._too_short())
        if not any(dataset._count(s).any() for s in range(len(dataset._shards))):
            raise UserError(dataset._no_targets())
        return dataset

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packings": {}, "_targets": {}, "_tokens": None}

    def read(self, indices: npt.ArrayLike) -> SampleBatch:
        """Samples.

        Args:
            indices: Sample numbers, in any order, repeats allowed.
        """
        wanted, shards = self._locate(indices)
        shape = (wanted.size, self.seq_len)
        tokens: Int64s = np.zeros(shape, dtype=np.int64)
        targets: Int64s = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        segments: Int64s | None = np.zeros(shape, dtype=np.int64) if self.mask == "document" else None
        for shard in sorted(set(shards.tolist())):
            chosen = np.flatnonzero(shards == shard)
            pieces = self._pack(shard).pieces(wanted[chosen] - self._starts[shard])
            source, place = _spread(pieces, chosen, self.seq_len)
            data = self._map(shard)
            following: Int64s = data[source + 1].astype(np.int64)
            if self.prompt_masking:
                following[self._folder.map_loss_mask(self._shards[shard])[source + 1] == 0] = IGNORE_INDEX
            tokens.reshape(-1)[place] = data[source]
            targets.reshape(-1)[place] = following
            if segments is not None:
                segments[chosen] = np.bincount(pieces.row, minlength=chosen.size)[:, None]  # padding's number
                segments.reshape(-1)[place] = np.repeat(pieces.number, pieces.size)
        return SampleBatch(tokens, targets, segments)

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """Targets of samples that count in the loss, all together; counted once a shard, then looked up."""
        wanted, shards = self._locate(indices)
        if self.mask == "causal" and not self.prompt_masking:
            return wanted.size * self.seq_len
        return sum(
            int(self._count(shard)[wanted[shards == shard] - self._starts[shard]].sum())
            for shard in sorted(set(shards.tolist()))
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is not one sample, which ``eval`` may be."""
        return len(self) == 0

    @property
    def longest_sequence(self) -> int:
        """The largest ``seq_len`` that a shard fills, or with ``mask="document"`` a document; 0 if none."""
        if self.mask == "causal":
            return max((shard.tokens - 1 for shard in self._shards), default=0)
        return max((int(self._document_sizes(shard).max()) - 1 for shard in self._shards), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the split, ends of documents included."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def dropped_tokens(self) -> int:
        """Tokens in no sample: at the shards' ends, or with ``mask="document"`` documents of one token."""
        if self.mask == "document":
            return sum(int((self._document_sizes(shard) == 1).sum()) for shard in self._shards)
        counted = zip(self._shards, self.shard_sample_counts, strict=True)
        return sum(s.tokens - (count * self.seq_len + 1 if count else 0) for s, count in counted)

    @property
    def padding(self) -> int:
        """Positions of all samples that hold no token of a document."""
        filled = sum(int(self._pack(s).count_positions().sum()) for s in range(len(self._shards)))
        return len(self) * self.seq_len - filled

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

    def _locate(self, indices: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Sample numbers as an array, and the shard of each."""
        wanted: Int64s = np.asarray(indices, dtype=np.int64).reshape(-1)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} asked of {len(self)}")
        return wanted, np.searchsorted(self._starts, wanted, side="right") - 1

    def _map(self, shard: int) -> npt.NDArray[Any]:
        """The tokens of a shard."""
        if self._tokens is None or self._tokens[0] != shard:
            self._tokens = shard, self._folder.map_tokens(self._shards[shard])
        return self._tokens[1]

    def _pack(self, shard: int) -> Packing:
        if shard not in self._packings:
            entry = self._shards[shard]
            if self.mask == "causal":
                packing: Packing = ContiguousPacking(entry.tokens, self.seq_len)
            else:
                packing = DocumentPacking(self._folder.map_documents(entry), entry.tokens, self.seq_len)
            if len(self._packings) == _CACHED_PACKINGS:
                del self._packings[next(iter(self._packings))]
            self._packings[shard] = packing
        return self._packings[shard]

    def _count(self, shard: int) -> Int64s:
        """Targets of each sample of a shard."""
        if shard not in self._targets:
            packing, entry = self._pack(shard), self._shards[shard]
            if self.prompt_masking:
                self._targets[shard] = packing.count_loss_targets(self._folder.map_loss_mask(entry))
            else:
                self._targets[shard] = packing.count_positions()
        return self._targets[shard]

    def _document_sizes(self, shard: ShardEntry) -> Int64s:
        starts = self._folder.map_documents(shard).astype(np.int64)
        return np.append(starts[1:], shard.tokens) - starts

    def _too_short(self) -> Problem:
        folder, longest = self._folder.folder, self.longest_sequence
        has = f"the longest shard of {folder} has {longest + 1}" if longest else f"{folder} has none"
        return Problem(
            code="data-corpus-short",
            path="data.seq_len",
            value=self.seq_len,
            rule=f"needs {self.seq_len + 1} tokens in one shard, and {has}",
            fix=f"Use data.seq_len={longest} or less, or add text" if longest else "Add text",
        )

    def _no_targets(self) -> Problem:
        return Problem(
            code="data-no-targets",
            path="data.prompt_masking",
            value=self.prompt_masking,
            rule=f"leaves nothing to learn: no target of the split {self.split!r} belongs to an answer "
            f"({len(self)} samples of {self.seq_len} in {self._folder.folder})",
            fix="Check the answers in the data, or set data.prompt_masking=false",
        )


def no_prompts(why: str) -> Problem:
    """The problem of masking prompts in data that does not say what a prompt is."""
    return Problem(
        code="data-no-prompts",
        path="data.prompt_masking",
        value=True,
        rule=f"needs data that knows its prompts, and {why}",
        fix="Use lines with prompt and answer, or messages, and a template, such as data.template=chatml",
    )


def _spread(pieces: RowPieces, rows: Int64s, seq_len: int) -> tuple[Int64s, Int64s]:
    """For each position of the pieces: its input token in the shard, and its place in the flat result."""
    ramp = np.arange(int(pieces.size.sum())) - np.repeat(np.cumsum(pieces.size) - pieces.size, pieces.size)
    places = rows[pieces.row] * seq_len + pieces.offset
    return np.repeat(pieces.begin, pieces.size) + ramp, np.repeat(places, pieces.size) + ramp
