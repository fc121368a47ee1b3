"""The identity of prepared data in a few numbers: enough to tell whether other data begin with them.

A checkpoint keeps it. Its size does not depend on the number of shards: all but the last are one checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

from meshwright.data.shards import SPLITS, ShardEntry, ShardFolder, SplitEntries, SplitEntry, broken_shards
from meshwright.spec.fields import Natural


@dataclass(frozen=True)
class ShardIdentity:
    """One shard: sizes and checksums."""

    tokens: Natural
    sha256: str
    documents: Natural
    documents_sha256: str
    loss_mask_sha256: str | None = None


@dataclass(frozen=True)
class SplitIdentity:
    """The shards of a split, in order."""

    shards: Natural
    sha256: str
    """Checksum of all shards but the last."""
    last: ShardIdentity | None
    """None for an empty split."""


@dataclass(frozen=True)
class SourceIdentity:
    """One source of the training data."""

    tokenizer_sha256: str
    dtype: str
    """Dtype of the tokens."""
    train: SplitIdentity
    eval: SplitIdentity
    samples: Natural
    """Training samples of an epoch."""
    index_sha256: str = ""
    """Hash of ``index.json``; empty in older checkpoints."""

    @property
    def length(self) -> tuple[int, ...]:
        """Data that have grown have a larger one than before."""
        last = (self.train.last, self.eval.last)
        tokens = [0 if shard is None else shard.tokens for shard in last]
        return self.train.shards, tokens[0], self.eval.shards, tokens[1]


def identify_split(shards: Sequence[ShardEntry]) -> SplitIdentity:
    """The identity of the shards of a split."""
    last = identify_shard(shards[-1]) if shards else None
    return SplitIdentity(len(shards), chain_shards(shards[:-1]), last)


def identify_shard(shard: ShardEntry) -> ShardIdentity:
    """The identity of a shard."""
    return ShardIdentity(
        shard.tokens, shard.sha256, shard.documents, shard.documents_sha256, shard.loss_mask_sha256
    )


def chain_shards(shards: Sequence[ShardEntry]) -> str:
    """One checksum of several shards."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{astuple(identify_shard(shard))}\n".encode())
    return digest.hexdigest()


def open_as(folder: Path, identity: SourceIdentity) -> ShardFolder:
    """Open a prepared folder as it was: without the documents that were added later.

    Raises:
        UserError: It does not begin with these shards.
    """
    opened = ShardFolder.open(folder)
    splits = {split: _first_shards(opened, split, getattr(identity, split)) for split in SPLITS}
    index = replace(opened.index, splits=SplitEntries(**splits))
    sha256 = hashlib.sha256(index.to_bytes()).hexdigest()
    if any(identify_split(index.split(split).shards) != getattr(identity, split) for split in SPLITS) or (
        identity.index_sha256 not in ("", sha256)
    ):
        raise broken_shards(folder, "does not begin with the shards that the run has read")
    return ShardFolder(folder, index)


def _first_shards(folder: ShardFolder, split: str, identity: SplitIdentity) -> SplitEntry:
    shards, last = folder.index.split(split).shards[: identity.shards], identity.last
    if shards and last is not None:
        shards = (*shards[:-1], replace(shards[-1], **asdict(last)))
    return SplitEntry(shards)
