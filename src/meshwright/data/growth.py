"""Whether data have only grown since a checkpoint was saved: the old documents first, then others.

The order of samples is a function of their numbers (``order``). Shards that are appended change no number and
no order in the first epoch. A last shard that has grown is shuffled anew; if no sample of it was read yet,
nothing that was read comes again. Any other change would give the position another meaning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

from meshwright.core.units import format_plural
from meshwright.data.identity import ShardIdentity, SourceIdentity, SplitIdentity
from meshwright.data.mixture import read_mixture
from meshwright.data.shards import SPLITS, ShardEntry, ShardFolder

_READ_BYTES = 8 * 1024**2


class DataChangedError(ValueError):
    """The data have not only grown; says what else."""


def data_sha256(folder: Path) -> str:
    """Identity of prepared data; of a mixture, of its sources with their names and weights."""
    digest = hashlib.sha256()
    for source in read_mixture(folder):
        if source.name:
            digest.update(f"{source.name}={source.weight}\n".encode())
        digest.update(ShardFolder.open(Path(source.folder)).index.to_bytes())
    return digest.hexdigest()


def identify_sources(folder: Path, source_counts: Sequence[Sequence[int]]) -> dict[str, SourceIdentity]:
    """The identity of each source by its name; the name of an only source is empty.

    Args:
        folder: A prepared folder, or a mixture of them.
        source_counts: Training samples in each shard of each source.
    """
    found = {}
    for source, counts in zip(read_mixture(folder), source_counts, strict=True):
        index = ShardFolder.open(Path(source.folder)).index
        train, held_out = (_identify(index.split(split).shards) for split in SPLITS)
        last = counts[-1] if counts else 0
        found[source.name] = SourceIdentity(
            index.tokenizer.sha256, index.dtype, train, held_out, sum(counts), last
        )
    return found


def check_growth(before: Mapping[str, SourceIdentity], folder: Path, positions: Mapping[str, int]) -> None:
    """Check that the data of a checkpoint are the beginning of the data in a folder.

    Args:
        before: Sources of the checkpoint; the names are those of the folder.
        folder: A prepared folder, or a mixture of them.
        positions: Samples read from each source.

    Raises:
        DataChangedError: They are not, or samples that were read would be shuffled anew.
    """
    for source in read_mixture(folder):
        named = f"source {source.name}: " if source.name else ""
        old, shards = before.get(source.name), ShardFolder.open(Path(source.folder))
        if old is None:
            raise DataChangedError(f"{named}the checkpoint does not say which shards it was trained on")
        if (old.tokenizer_sha256, old.dtype) != (shards.index.tokenizer.sha256, shards.index.dtype):
            raise DataChangedError(f"{named}the data were prepared with another tokenizer")
        has_grown = {split: _check_split(getattr(old, split), shards, split, named) for split in SPLITS}
        read = positions.get(source.name, 0)
        if has_grown["train"] and read > old.samples - old.last_samples:
            which = f"train-{old.train.shards - 1:05d}"
            rule = f"the shard {which} has grown, and some of its samples were read already"
            raise DataChangedError(f"{named}{rule}: it would be shuffled anew")


def describe_growth(
    before: Mapping[str, SourceIdentity], now: Mapping[str, SourceIdentity], positions: Mapping[str, int]
) -> list[str]:
    """The effects of grown data on the run, in sentences; for data that :func:`check_growth` accepts.

    Args:
        before: Sources of the checkpoint.
        now: Sources of the run.
        positions: Samples read from each source.
    """
    notes = []
    for name, new in now.items():
        old, named = before.get(name), f"source {name}: " if name else ""
        if old is None or old == new:
            continue
        if old.train != new.train:
            grown = f"{named}the data grew from {old.samples} to {format_plural(new.samples, 'sample')}"
            notes.append(f"{grown} per epoch; {_describe_order(old, new, positions.get(name, 0))}")
        if old.eval != new.eval:
            notes.append(f"{named}the held-out data grew: evaluations may use other samples")
    return notes


def _describe_order(old: SourceIdentity, new: SourceIdentity, read: int) -> str:
    if read <= old.samples:
        return "the samples so far are the same, and the new ones follow later in this epoch"
    epoch, offset = divmod(read, max(1, new.samples))
    where = f"sample {offset} of epoch {epoch + 1}"
    return f"an epoch was complete before: it goes on at {where}, and some samples come again before others"


def _identify(shards: Sequence[ShardEntry]) -> SplitIdentity:
    last = _facts(shards[-1]) if shards else None
    return SplitIdentity(len(shards), _chain(shards[:-1]), last)


def _facts(shard: ShardEntry) -> ShardIdentity:
    return ShardIdentity(
        shard.tokens, shard.sha256, shard.documents, shard.documents_sha256, shard.loss_mask_sha256
    )


def _chain(shards: Sequence[ShardEntry]) -> str:
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{astuple(_facts(shard))}\n".encode())
    return digest.hexdigest()


def _check_split(old: SplitIdentity, folder: ShardFolder, split: str, named: str) -> bool:
    """Whether the last of the old shards has grown; raises if the old shards are not the first ones."""
    shards = folder.index.split(split).shards
    if len(shards) < old.shards:
        rule = f"the {split} split has {format_plural(len(shards), 'shard')}, and had {old.shards}"
        raise DataChangedError(f"{named}{rule}")
    if old.last is None:
        return False
    if _chain(shards[: old.shards - 1]) != old.sha256:
        which = format_plural(old.shards - 1, "shard")
        raise DataChangedError(f"{named}the first {which} of the {split} split differ")
    entry = shards[old.shards - 1]
    if _facts(entry) == old.last:
        return False
    if not _begins_with(folder, entry, old.last):
        raise DataChangedError(f"{named}the shard {entry.file} differs")
    return True


def _begins_with(folder: ShardFolder, entry: ShardEntry, old: ShardIdentity) -> bool:
    """Whether a shard begins with the documents of another one."""
    if entry.tokens < old.tokens or entry.documents < old.documents:
        return False
    files = [
        (entry.file, old.tokens * folder.index.token_dtype.itemsize, old.sha256),
        (entry.documents_file, old.documents * 8, old.documents_sha256),
    ]
    if entry.loss_mask_file is not None and old.loss_mask_sha256 is not None:
        files.append((entry.loss_mask_file, old.tokens, old.loss_mask_sha256))
    elif (entry.loss_mask_file is None) != (old.loss_mask_sha256 is None):
        return False
    return all(_sha256_of_first(folder.folder / name, size) == sha256 for name, size, sha256 in files)


def _sha256_of_first(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (block := file.read(min(size, _READ_BYTES))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
