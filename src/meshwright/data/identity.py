"""The identity of prepared data in a few numbers: enough to tell whether other data begin with them.

A checkpoint keeps it. Its size does not depend on the number of shards: all but the last are one checksum.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    last_samples: Natural
    """Training samples of the last shard."""
