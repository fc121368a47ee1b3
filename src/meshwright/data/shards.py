"""The on-disk format of prepared data, version 1.

::

    prepared/
      index.json            sizes, hashes, the tokenizer's fingerprint
      tokenizer.json
      train-00000.bin       tokens, little-endian uint16 (vocabulary up to 65,536) or uint32
      train-00000.docs.u64  little-endian uint64: the token at which each document starts
      train-00000.loss_mask.u8  only for instruction data: a byte per token, 1 in an answer, else 0
      eval-00000.bin ...

An end-of-document token follows each document. A document never spans shards; one above the size limit has
its own shard. Shards are immutable and numbered: new data are new shards, and only the index changes. The
index has no times and no paths, so the same input gives the same bytes.

Opening a folder checks file sizes; :meth:`ShardFolder.verify` checks hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from meshwright.core.errors import Problem, UserError
from meshwright.data.tokenizer import TOKENIZER_FILE
from meshwright.spec.paths import PREPARED_INDEX

SHARDS_VERSION = 1
SPLITS = ("train", "eval")
SHARD_TOKENS = 64 * 1024**2
"""Maximum tokens per shard, unless one document is longer."""

_SHARD_NAME = r"^(train|eval)-[0-9]{5,}\.(bin|docs\.u64|loss_mask\.u8)$"
_READ_BYTES = 8 * 1024**2

FileName = Annotated[str, Field(pattern=_SHARD_NAME)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ShardEntry:
    """One shard in the index."""

    file: FileName
    tokens: Positive
    sha256: Sha256
    documents_file: FileName
    documents: Positive
    documents_sha256: Sha256
    loss_mask_file: FileName | None = None
    """Which tokens count in the loss; None for plain text. Early version 1 folders do not have it."""
    loss_mask_sha256: Sha256 | None = None


@dataclass(frozen=True)
class SplitEntry:
    """The shards of one split, in order."""

    shards: tuple[ShardEntry, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the split, including end-of-document tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.documents for shard in self.shards)


@dataclass(frozen=True)
class SplitEntries:
    """Both splits; either may be empty."""

    train: SplitEntry
    eval: SplitEntry


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer of the data."""

    name: str
    vocab_size: Positive
    end_of_document: Annotated[int, Field(ge=0)]
    sha256: Sha256


@dataclass(frozen=True)
class ShardIndex:
    """The contents of ``index.json``."""

    version: int
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerEntry
    splits: SplitEntries

    def split(self, name: str) -> SplitEntry:
        """A split by its name."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is not one of {', '.join(SPLITS)}")
        entry: SplitEntry = getattr(self.splits, name)
        return entry

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """All shards in index order: train, then eval."""
        return self.splits.train.shards + self.splits.eval.shards

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of the token files."""
        return np.dtype(self.dtype).newbyteorder("<")

    def to_bytes(self) -> bytes:
        """The exact bytes of ``index.json``."""
        content = asdict(self)
        for split in content["splits"].values():
            # Missing values are not written, so that folders without loss masks keep their bytes.
            split["shards"] = [{k: v for k, v in s.items() if v is not None} for s in split["shards"]]
        return (json.dumps(content, indent=2) + "\n").encode()


_INDEX: TypeAdapter[ShardIndex] = TypeAdapter(ShardIndex)


@dataclass(frozen=True)
class ShardFolder:
    """An opened prepared folder; file sizes are checked."""

    folder: Path
    index: ShardIndex

    @classmethod
    def open(cls, folder: Path) -> ShardFolder:
        """Read the index and check the size of each file.

        Raises:
            UserError: The folder or a file is missing, corrupt, truncated or of another version.
        """
        if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for a path that is too long
            raise UserError(
                Problem(
                    code="data-path-missing",
                    path=str(folder),
                    rule="is not a folder of prepared data",
                    fix="Prepare one: meshwright prepare CORPUS.toml",
                )
            )
        opened = cls(folder, _read_index(folder / PREPARED_INDEX))
        for shard in opened.index.shards:
            _check_size(folder / shard.file, shard.tokens * opened.index.token_dtype.itemsize)
            _check_size(folder / shard.documents_file, shard.documents * 8)
            if shard.loss_mask_file is not None:
                _check_size(folder / shard.loss_mask_file, shard.tokens)
        return opened

    @property
    def has_prompts(self) -> bool:
        """Whether the folder has conversations, with a loss mask; not plain text."""
        return all(shard.loss_mask_file is not None for shard in self.index.shards)

    def verify(self) -> None:
        """Read every file and compare its hash with the index.

        Raises:
            UserError: Files differ; all of them are reported.
        """
        expected = [(TOKENIZER_FILE, self.index.tokenizer.sha256)]
        for shard in self.index.shards:
            expected += [(shard.file, shard.sha256), (shard.documents_file, shard.documents_sha256)]
            if shard.loss_mask_file is not None:
                expected.append((shard.loss_mask_file, shard.loss_mask_sha256 or "nothing"))
        problems = []
        for name, sha256 in expected:
            digest = hashlib.sha256()
            try:
                _update_from_file(digest, self.folder / name)
            except OSError as error:
                problems.append(_broken(self.folder / name, f"cannot be read: {error.strerror or error}"))
                continue
            if digest.hexdigest() != sha256:
                rule = f"is damaged: its SHA-256 is {digest.hexdigest()[:12]}, the index says {sha256[:12]}"
                problems.append(_broken(self.folder / name, rule))
        if problems:
            raise UserError(*problems)

    def content_sha256(self) -> str:
        """SHA-256 of the token files in index order, then the index: the identity of the data."""
        digest = hashlib.sha256()
        for shard in self.index.shards:
            _update_from_file(digest, self.folder / shard.file)
        _update_from_file(digest, self.folder / PREPARED_INDEX)
        return digest.hexdigest()

    def map_tokens(self, shard: ShardEntry) -> npt.NDArray[Any]:
        """A shard's tokens, memory-mapped and read-only."""
        return self._map(shard.file, self.index.token_dtype, shard.tokens)

    def map_documents(self, shard: ShardEntry) -> npt.NDArray[np.uint64]:
        """The starts of a shard's documents, memory-mapped and read-only."""
        return self._map(shard.documents_file, np.dtype("<u8"), shard.documents)

    def map_loss_mask(self, shard: ShardEntry) -> npt.NDArray[np.uint8]:
        """A shard's loss mask, memory-mapped and read-only."""
        assert shard.loss_mask_file is not None, f"{shard.file} has no loss mask"
        return self._map(shard.loss_mask_file, np.dtype("u1"), shard.tokens)

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """The first elements of a file: it may have grown since the index was read."""
        try:
            return np.asarray(np.memmap(self.folder / name, dtype=dtype, mode="r", shape=(count,)))
        except (OSError, ValueError) as error:
            raise UserError(_broken(self.folder / name, f"cannot be mapped: {error}")) from error


def looks_prepared(folder: Path) -> bool:
    """Whether a folder has an index of prepared data."""
    try:
        index = json.loads((folder / PREPARED_INDEX).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(index, dict) and "splits" in index


def is_prepared_folder(folder: Path) -> bool:
    """Whether a folder has only prepared data, so that it can be replaced."""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    others = names - {PREPARED_INDEX, TOKENIZER_FILE}
    return PREPARED_INDEX in names and all(re.match(_SHARD_NAME, name) for name in others)


def broken_shards(file: Path, rule: str) -> UserError:
    """The error of an unusable file of prepared data."""
    return UserError(_broken(file, rule))


def _read_index(path: Path) -> ShardIndex:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise broken_shards(path, "is missing, and prepared data cannot be read without its index") from error
    except OSError as error:
        raise broken_shards(path, f"cannot be read: {error.strerror or error}") from error
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise broken_shards(path, "is corrupt: it is not JSON") from error
    version = content.get("version") if isinstance(content, dict) else None
    if type(version) is int and version != SHARDS_VERSION:
        raise broken_shards(path, f"has version {version}; this meshwright reads version {SHARDS_VERSION}")
    try:
        return _INDEX.validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise broken_shards(path, f"is corrupt at {where}: {first['msg']}") from error


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise broken_shards(path, f"cannot be read: {error.strerror or error}") from error
    if size != expected:
        raise broken_shards(path, f"has {size} bytes where the index says {expected}")


def _broken(file: Path, rule: str) -> Problem:
    return Problem(
        code="data-shards-broken",
        path=str(file),
        rule=rule,
        fix="Copy the folder again, or prepare it again: meshwright prepare CORPUS.toml",
    )


def _update_from_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
