"""Writing shards: documents go in one by one, the index comes last.

The writer fills a folder that nobody reads yet (see ``stage``); it knows nothing of corpora or splits' rules.
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from meshwright.core.files import sync_path
from meshwright.prepare.shards import (
    INDEX_FILE,
    SHARD_TOKENS,
    SHARDS_VERSION,
    SPLITS,
    ShardEntry,
    ShardIndex,
    SplitEntries,
    SplitEntry,
    TokenizerEntry,
)
from meshwright.prepare.stage import storage_errors
from meshwright.prepare.tokenizer import TOKENIZER_FILE, Tokenizer

_BUFFER_BYTES = 1024**2


class ShardWriter:
    """Writes the splits of one prepared folder."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS, shown: Path | None = None
    ) -> None:
        """Begin an empty folder.

        Args:
            folder: An existing, empty folder.
            tokenizer: What made the tokens; it is saved with them.
            shard_tokens: Tokens in a shard, at most, unless one document is longer.
            shown: The folder to name in errors, where ``folder`` is temporary.
        """
        self._folder = folder
        self._shown = shown or folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._splits = {name: _SplitWriter(folder, name, shard_tokens) for name in SPLITS}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for split in self._splits.values():
            split.abandon()

    def add(self, split: str, tokens: npt.NDArray[Any]) -> None:
        """Append one document; its end is added here."""
        document = np.empty(len(tokens) + 1, dtype=self._dtype)
        document[:-1] = tokens
        document[-1] = self._tokenizer.end_of_document
        with storage_errors(self._shown):
            self._splits[split].add(document)

    def finish(self) -> ShardIndex:
        """Close the last shards, flush everything to the device, and write the index."""
        tokenizer = self._tokenizer
        with storage_errors(self._shown):
            train, held_out = (SplitEntry(shards=self._splits[name].finish()) for name in SPLITS)
            index = ShardIndex(
                version=SHARDS_VERSION,
                dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
                tokenizer=TokenizerEntry(
                    name=tokenizer.name,
                    vocab_size=tokenizer.vocab_size,
                    end_of_document=tokenizer.end_of_document,
                    sha256=tokenizer.fingerprint(),
                ),
                splits=SplitEntries(train=train, eval=held_out),
            )
            tokenizer.save(self._folder)
            sync_path(self._folder / TOKENIZER_FILE)
            (self._folder / INDEX_FILE).write_bytes(index.to_bytes())
            sync_path(self._folder / INDEX_FILE)
        return index


class _SplitWriter:
    """The shards of one split; at most one is open."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._done: list[ShardEntry] = []
        self._file: BinaryIO | None = None
        self._tokens = 0
        self._starts = array("Q")
        self._digest = hashlib.sha256()

    def add(self, document: npt.NDArray[Any]) -> None:
        if self._file is not None and self._tokens + len(document) > self._shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = (self._folder / f"{self._stem}.bin").open("xb", buffering=_BUFFER_BYTES)
            self._tokens, self._starts, self._digest = 0, array("Q"), hashlib.sha256()
        self._starts.append(self._tokens)
        self._tokens += len(document)
        data = document.tobytes()
        self._digest.update(data)
        self._file.write(data)

    def finish(self) -> tuple[ShardEntry, ...]:
        self._close_shard()
        return tuple(self._done)

    def abandon(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing writes what is buffered, and the disk may be full
                self._file.close()
            self._file = None

    @property
    def _stem(self) -> str:
        return f"{self._name}-{len(self._done):05d}"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        sync_path(self._folder / f"{self._stem}.bin")
        starts = np.asarray(self._starts, dtype="<u8").tobytes()
        documents_file = self._folder / f"{self._stem}.docs.u64"
        documents_file.write_bytes(starts)
        sync_path(documents_file)
        entry = ShardEntry(
            file=f"{self._stem}.bin",
            tokens=self._tokens,
            sha256=self._digest.hexdigest(),
            documents_file=documents_file.name,
            documents=len(self._starts),
            documents_sha256=hashlib.sha256(starts).hexdigest(),
        )
        self._file = None
        self._done.append(entry)
