"""Whether data have only grown since a checkpoint was saved: the old documents first, then others.

The order of samples is a function of their numbers (``order``), and data that grow change no number. Which
samples belong to which epoch is in the table of ``epochs``. After any other change the position would refer
to other samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from meshwright.core.errors import UserError
from meshwright.core.units import format_plural
from meshwright.data.dataset import TokenDataset
from meshwright.data.epochs import CorpusState, EpochTable
from meshwright.data.identity import (
    ShardIdentity,
    SourceIdentity,
    SplitIdentity,
    chain_shards,
    identify_shard,
    identify_split,
)
from meshwright.data.mixture import MixedSource, read_mixture
from meshwright.data.shards import SPLITS, ShardEntry, ShardFolder, ShardIndex

_READ_BYTES = 8 * 1024**2


class DataChangedError(ValueError):
    """The data have not only grown; says what else."""


def data_sha256(folder: Path) -> str:
    """Identity of prepared data; of a mixture, of its sources with their names and weights."""
    return _sha256_of([(source, ShardFolder.open(Path(source.folder))) for source in read_mixture(folder)])


def _sha256_of(sources: Iterable[tuple[MixedSource, ShardFolder]]) -> str:
    digest = hashlib.sha256()
    for source, shards in sources:
        if source.name:
            digest.update(f"{source.name}={source.weight}\n".encode())
        digest.update(shards.index.to_bytes())
    return digest.hexdigest()


def identify_corpus(folder: Path, dataset: TokenDataset) -> CorpusState:
    """The state of data of which nothing was read yet; the name of an only source is empty.

    Args:
        folder: A prepared folder, or a mixture of them.
        dataset: Its training samples.
    """
    sources = list(zip(read_mixture(folder), dataset.sources, strict=True))
    found = {}
    for (source, shards), counts in zip(sources, dataset.source_counts, strict=True):
        found[source.name] = _identify_source(shards.index, sum(counts))
    return CorpusState.first(_sha256_of(sources), found)


def _identify_source(index: ShardIndex, samples: int) -> SourceIdentity:
    train, held_out = (identify_split(index.split(split).shards) for split in SPLITS)
    sha256 = hashlib.sha256(index.to_bytes()).hexdigest()
    return SourceIdentity(index.tokenizer.sha256, index.dtype, train, held_out, samples, sha256)


def warn_of_replacement(earlier: Path, folder: Path) -> list[str]:
    """A sentence if a prepared folder is not the beginning of the one that takes its place; else nothing.

    Args:
        earlier: The folder that is replaced; it may be missing or broken.
        folder: The new one.
    """
    try:
        before = _identify_source(ShardFolder.open(earlier).index, samples=0)
        check_growth({"": before}, folder)
    except DataChangedError as error:
        what = f"the earlier documents of {earlier} are not the first ones any more: {error}"
        return [f"{what}. A run that follows this folder stops, and its checkpoints need the earlier data"]
    except UserError:  # there was nothing to read
        return []
    return []


def check_growth(before: Mapping[str, SourceIdentity], folder: Path) -> None:
    """Check that the data of a checkpoint are the beginning of the data in a folder.

    Args:
        before: Sources of the checkpoint; the names are those of the folder.
        folder: A prepared folder, or a mixture of them.

    Raises:
        DataChangedError: They are not.
    """
    for source in read_mixture(folder):
        named = f"source {source.name}: " if source.name else ""
        old, shards = before.get(source.name), ShardFolder.open(Path(source.folder))
        if old is None:
            raise DataChangedError(f"{named}the checkpoint does not say which shards it was trained on")
        if (old.tokenizer_sha256, old.dtype) != (shards.index.tokenizer.sha256, shards.index.dtype):
            raise DataChangedError(f"{named}the data were prepared with another tokenizer")
        for split in SPLITS:
            _check_split(getattr(old, split), shards, split, named)


def describe_growth(
    before: Mapping[str, SourceIdentity], now: Mapping[str, SourceIdentity], epochs: Mapping[str, EpochTable]
) -> list[str]:
    """The effects of grown data on the run, in sentences; for data that :func:`check_growth` accepts.

    Args:
        before: Sources of the checkpoint.
        now: Sources of the run.
        epochs: With the grown data.
    """
    notes = []
    for name, new in now.items():
        old, named = before.get(name), f"source {name}: " if name else ""
        if old is None:
            continue
        if old.train != new.train:
            grown = f"{named}the data grew from {old.samples} to {format_plural(new.samples, 'sample')}"
            epoch = epochs[name][-1].epoch + 1
            notes.append(f"{grown} per epoch; the new ones follow at the end of epoch {epoch}")
        if old.eval != new.eval:
            notes.append(f"{named}the held-out data grew: evaluations may use other samples")
    return notes


def _check_split(old: SplitIdentity, folder: ShardFolder, split: str, named: str) -> None:
    """Raises if the old shards are not the first ones; the last of them may have grown."""
    shards = folder.index.split(split).shards
    if len(shards) < old.shards:
        rule = f"the {split} split has {format_plural(len(shards), 'shard')}, and had {old.shards}"
        raise DataChangedError(f"{named}{rule}")
    if old.last is None:
        return
    if chain_shards(shards[: old.shards - 1]) != old.sha256:
        which = format_plural(old.shards - 1, "shard")
        raise DataChangedError(f"{named}the first {which} of the {split} split differ")
    entry = shards[old.shards - 1]
    if identify_shard(entry) != old.last and not _begins_with(folder, entry, old.last):
        raise DataChangedError(f"{named}the shard {entry.file} differs")


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
