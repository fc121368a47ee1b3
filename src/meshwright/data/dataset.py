"""Samples from memory-mapped shards: a sample is one row of a packing (see ``packing``).

A row has tokens and targets, and with ``mask="document"`` also a document id per position, so that attention
and positions restart in each document. A target without loss (padding, a masked prompt) is ``IGNORE_INDEX``.
``order`` has the sample order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError
from meshwright.data.epochs import EpochTable, order_of_epochs
from meshwright.data.identity import SourceIdentity, open_as
from meshwright.data.mixture import MixedSource, MixtureOrder, MixturePattern, read_mixture
from meshwright.data.order import Order
from meshwright.data.packing import ContiguousPacking, DocumentPacking, Packing, RowPieces
from meshwright.data.shards import ShardEntry, ShardFolder, broken_shards
from meshwright.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from meshwright.spec.job import Data

IGNORE_INDEX = -100
"""A target without loss: padding, a masked prompt, a zero-weight sample."""

Int64s = npt.NDArray[np.int64]
Mask = Literal["causal", "document"]

_CACHED_PACKINGS = 4
"""Shards of a source whose packing is cached; samples are read shard by shard, so few are needed."""


@dataclass(frozen=True)
class SampleBatch:
    """Samples as arrays of shape ``(n, seq_len)``."""

    tokens: Int64s
    targets: Int64s
    """The next token, or ``IGNORE_INDEX``."""
    segments: Int64s | None
    """With ``mask="document"``: document id within the row, from 0; padding has the last id."""
    lengths: Int64s | None = None
    """Positions of each row before its padding, ``(n,)``; None if no row has padding."""


class TokenDataset:
    """The samples of one split, numbered over all shards.

    A few shards stay mapped: the samples of a source come from one shard after the other, and mapping a file
    takes as long as reading a few samples. A pickled copy maps again in its process.
    """

    mixture: tuple[MixedSource, ...] = ()
    """The sources, if there are several."""

    def __init__(
        self,
        folders: ShardFolder | Sequence[ShardFolder],
        split: str,
        seq_len: int,
        mask: Mask = "causal",
        prompt_masking: bool = False,
    ) -> None:
        """Use :meth:`open`, which also checks that there are samples and targets."""
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.split = split
        self.seq_len = seq_len
        self.mask = mask
        self.prompt_masking = prompt_masking
        folders = [folders] if isinstance(folders, ShardFolder) else folders
        self._folder = folders[0]
        self.sources: tuple[ShardFolder, ...] = tuple(folders)
        located = [(folder, entry) for folder in folders for entry in folder.index.split(split).shards]
        self._shards: tuple[ShardEntry, ...] = tuple(entry for _, entry in located)
        self._folders: tuple[ShardFolder, ...] = tuple(folder for folder, _ in located)
        """The folder of each shard."""
        self._cached = _CACHED_PACKINGS * len(folders)
        self._packings: dict[int, Packing] = {}
        self._targets: dict[int, Int64s] = {}
        self._tokens: dict[int, npt.NDArray[Any]] = {}
        self.shard_sample_counts: tuple[int, ...] = tuple(
            self._pack(s).rows for s in range(len(self._shards))
        )
        ends = np.cumsum([len(folder.index.split(split).shards) for folder in folders]).tolist()
        self.source_counts: tuple[tuple[int, ...], ...] = tuple(
            self.shard_sample_counts[begin:end] for begin, end in zip([0, *ends], ends, strict=False)
        )
        """``shard_sample_counts`` of each source."""
        self._starts: Int64s = np.concatenate(([0], np.cumsum(self.shard_sample_counts))).astype(np.int64)

    @classmethod
    def open(
        cls,
        folder: Path,
        split: str,
        seq_len: int,
        mask: Mask = "causal",
        prompt_masking: bool = False,
        identities: Mapping[str, SourceIdentity] | None = None,
    ) -> TokenDataset:
        """Open a split of a prepared folder, or of a mixture of prepared folders.

        Args:
            folder: A prepared folder, or one with a ``mixture.json``.
            split: ``train``, or ``eval``, in which the last sample of a shard is padded instead of dropped.
            seq_len: Positions of a sample.
            mask: ``causal`` for samples that cross documents, ``document`` for packed whole documents.
            prompt_masking: Whether targets in prompts are ignored.
            identities: Sources whose later documents are left out, by name.

        Raises:
            UserError: The folder is broken, has no loss mask for prompt masking, or ``train`` has no samples
                or no targets. ``eval`` may be empty.
        """
        sources = read_mixture(folder)
        known = identities or {}
        opened = [
            open_as(Path(source.folder), known[source.name])
            if source.name in known
            else ShardFolder.open(Path(source.folder))
            for source in sources
        ]
        for shards in opened:
            if prompt_masking and not shards.has_prompts:
                raise UserError(no_prompts(f"{shards.folder} was prepared without a template"))
        dataset = cls(opened, split, seq_len, mask, prompt_masking)
        if len(sources) > 1:
            dataset.mixture = sources
        if split != "train":
            return dataset
        for source, shards, counts in zip(sources, opened, dataset.source_counts, strict=True):
            if source.weight and not sum(counts):
                raise UserError(cls(shards, split, seq_len, mask, prompt_masking)._too_short())
        if dataset.is_empty:
            raise UserError(dataset._too_short())
        if not any(dataset._count(s).any() for s in range(len(dataset._shards))):
            raise UserError(dataset._no_targets())
        return dataset

    @classmethod
    def open_set(cls, folder: Path, data: Data) -> TokenDataset:
        """Open an evaluation set: the ``eval`` split of a prepared folder.

        Args:
            folder: A prepared folder.
            data: Length, mask and prompt masking. A set without prompts has none to mask: all tokens count.
        """
        masked = data.prompt_masking and ShardFolder.open(folder).has_prompts
        return cls.open(folder, "eval", data.seq_len, data.mask, masked)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packings": {}, "_targets": {}, "_tokens": {}}

    def read(self, indices: npt.ArrayLike) -> SampleBatch:
        """Read samples.

        Args:
            indices: Sample numbers, in any order, with repeats.
        """
        wanted, shards = self._locate(indices)
        shape = (wanted.size, self.seq_len)
        tokens: Int64s = np.zeros(shape, dtype=np.int64)
        targets: Int64s = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        segments: Int64s | None = np.zeros(shape, dtype=np.int64) if self.mask == "document" else None
        lengths: Int64s | None = None if segments is None else np.zeros(wanted.size, dtype=np.int64)
        for shard in sorted(set(shards.tolist())):
            chosen = np.flatnonzero(shards == shard)
            pieces = self._pack(shard).pieces(wanted[chosen] - self._starts[shard])
            if segments is None and not self.prompt_masking:
                self._copy_rows(shard, pieces, chosen, (tokens, targets))
                continue
            source, position = _spread(pieces, chosen, self.seq_len)
            data = self._map(shard)
            following: Int64s = data[source + 1].astype(np.int64)
            if self.prompt_masking:
                following[self._folders[shard].map_loss_mask(self._shards[shard])[source + 1] == 0] = (
                    IGNORE_INDEX
                )
            tokens.reshape(-1)[position] = data[source]
            targets.reshape(-1)[position] = following
            if segments is not None and lengths is not None:
                lengths += np.bincount(position // self.seq_len, minlength=wanted.size)
                segments[chosen] = np.bincount(pieces.row, minlength=chosen.size)[:, None]  # id of padding
                segments.reshape(-1)[position] = np.repeat(pieces.number, pieces.size)
        return SampleBatch(tokens, targets, segments, lengths)

    def _copy_rows(self, shard: int, pieces: RowPieces, chosen: Int64s, out: tuple[Int64s, Int64s]) -> None:
        """Copy contiguous rows: one slice each is several times as fast as an index per token."""
        data, (tokens, targets) = self._map(shard), out
        rows = zip(chosen[pieces.row], pieces.offset, pieces.begin, pieces.size, strict=True)
        for row, offset, begin, size in ((int(a), int(b), int(c), int(d)) for a, b, c, d in rows):
            tokens[row, offset : offset + size] = data[begin : begin + size]
            targets[row, offset : offset + size] = data[begin + 1 : begin + size + 1]

    def count_targets(self, indices: npt.ArrayLike) -> int:
        """Number of targets with loss in some samples; counted once per shard, then cached."""
        wanted, shards = self._locate(indices)
        if self.mask == "causal" and not self.prompt_masking and self.split == "train":
            return wanted.size * self.seq_len
        return sum(
            int(self._count(shard)[wanted[shards == shard] - self._starts[shard]].sum())
            for shard in sorted(set(shards.tolist()))
        )

    def order(self, seed: int, epochs: Mapping[str, EpochTable] | None = None) -> Order:
        """The order of the samples.

        Args:
            seed: Seed of the run.
            epochs: Tables of sources, for data that have grown.
        """
        tables = epochs or {}
        if not self.mixture:
            return order_of_epochs(self.shard_sample_counts, seed, tables.get(""))
        orders = [
            order_of_epochs(counts, seed, tables.get(source.name))
            for source, counts in zip(self.mixture, self.source_counts, strict=True)
        ]
        return MixtureOrder(orders, [source.weight for source in self.mixture])

    def first_samples(self, count: int) -> Int64s:
        """The first samples, at most ``count``; of a mixture each source's share."""
        if not self.mixture:
            return np.arange(min(len(self), count))
        sizes = [sum(counts) for counts in self.source_counts]
        shares = MixturePattern([source.weight for source in self.mixture]).count(count)
        starts = np.cumsum([0, *sizes])
        parts = [start + np.arange(min(n, s)) for start, n, s in zip(starts, sizes, shares, strict=False)]
        return np.concatenate(parts)

    @property
    def is_empty(self) -> bool:
        """Whether there are no samples, as ``eval`` may have."""
        return len(self) == 0

    @property
    def longest_sequence(self) -> int:
        """The largest ``seq_len`` that a shard fills, or with ``mask="document"`` a document; 0 if none."""
        if self.mask == "causal":
            return max((shard.tokens - 1 for shard in self._shards), default=0)
        return max((int(self._document_sizes(s).max()) - 1 for s in range(len(self._shards))), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the split, including end-of-document tokens."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def dropped_tokens(self) -> int:
        """Tokens in no sample: at the ends of shards, or with ``mask="document"`` documents of one token."""
        if self.mask == "document":
            return sum(int((self._document_sizes(s) == 1).sum()) for s in range(len(self._shards)))
        counted = zip(self._shards, self.shard_sample_counts, strict=True)
        return sum(max(0, s.tokens - (count * self.seq_len + 1 if count else 0)) for s, count in counted)

    @property
    def padding(self) -> int:
        """Padding positions of all samples."""
        filled = sum(int(self._pack(s).count_positions().sum()) for s in range(len(self._shards)))
        return len(self) * self.seq_len - filled

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self._folder.index.tokenizer.vocab_size

    @property
    def end_of_document(self) -> int:
        """The end-of-document token."""
        return self._folder.index.tokenizer.end_of_document

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with ``tokenizer.json``."""
        return self._folder.folder

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data.

        Raises:
            UserError: It is missing, or differs from the index.
        """
        tokenizer = load_tokenizer(self.tokenizer_folder / TOKENIZER_FILE)
        if tokenizer.fingerprint() != self._folder.index.tokenizer.sha256:
            rule = "is not the tokenizer of these shards: its fingerprint differs from the index"
            raise broken_shards(self.tokenizer_folder / TOKENIZER_FILE, rule)
        return tokenizer

    def _locate(self, indices: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The sample numbers as an array, and their shards."""
        wanted: Int64s = np.asarray(indices, dtype=np.int64).reshape(-1)
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= len(self)):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} asked of {len(self)}")
        return wanted, np.searchsorted(self._starts, wanted, side="right") - 1

    def _map(self, shard: int) -> npt.NDArray[Any]:
        """The tokens of a shard."""
        if shard not in self._tokens:
            if len(self._tokens) == self._cached:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[shard] = self._folders[shard].map_tokens(self._shards[shard])
        return self._tokens[shard]

    def _pack(self, shard: int) -> Packing:
        if shard not in self._packings:
            entry = self._shards[shard]
            if self.mask == "causal":
                packing: Packing = ContiguousPacking(entry.tokens, self.seq_len, self.split == "eval")
            else:
                packing = DocumentPacking(
                    self._folders[shard].map_documents(entry), entry.tokens, self.seq_len
                )
            if len(self._packings) == self._cached:
                del self._packings[next(iter(self._packings))]
            self._packings[shard] = packing
        return self._packings[shard]

    def _count(self, shard: int) -> Int64s:
        """Number of targets of each sample of a shard."""
        if shard not in self._targets:
            packing, entry = self._pack(shard), self._shards[shard]
            if self.prompt_masking:
                self._targets[shard] = packing.count_loss_targets(self._folders[shard].map_loss_mask(entry))
            else:
                self._targets[shard] = packing.count_positions()
        return self._targets[shard]

    def _document_sizes(self, shard: int) -> Int64s:
        entry = self._shards[shard]
        starts = self._folders[shard].map_documents(entry).astype(np.int64)
        return np.append(starts[1:], entry.tokens) - starts

    def _too_short(self) -> Problem:
        folder, longest = self._folder.folder, self.longest_sequence
        has = (
            f"the longest shard of {folder} has {longest + 1}"
            if longest
            else f"{folder} has no text to train on"
        )
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
            rule=f"leaves no targets: no target of the split {self.split!r} is in an answer "
            f"({len(self)} samples of {self.seq_len} in {self._folder.folder})",
            fix="Check the answers in the data, or set data.prompt_masking=false",
        )


def no_prompts(why: str) -> Problem:
    """The problem of prompt masking with data without prompts."""
    return Problem(
        code="data-no-prompts",
        path="data.prompt_masking",
        value=True,
        rule=f"needs instruction data, and {why}",
        fix="Use lines with prompt and answer, or messages, and a template, such as data.template=chatml",
    )


def _spread(pieces: RowPieces, rows: Int64s, seq_len: int) -> tuple[Int64s, Int64s]:
    """For each position of the pieces: the index of its token in the shard, and in the flattened result."""
    ramp = np.arange(int(pieces.size.sum())) - np.repeat(np.cumsum(pieces.size) - pieces.size, pieces.size)
    starts = rows[pieces.row] * seq_len + pieces.offset
    return np.repeat(pieces.begin, pieces.size) + ramp, np.repeat(starts, pieces.size) + ramp
