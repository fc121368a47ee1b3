"""Writes shards: documents one by one, then the index.

The folder is a temporary one (see ``staging``).
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.core.files import sync_path
from meshwright.data.shards import (
    SHARD_TOKENS,
    SHARDS_VERSION,
    SPLITS,
    ShardEntry,
    ShardIndex,
    SplitEntries,
    SplitEntry,
    TokenizerEntry,
)
from meshwright.data.staging import storage_errors
from meshwright.data.tokenizer import TOKENIZER_FILE, Tokenizer
from meshwright.spec.paths import PREPARED_INDEX

_BUFFER_BYTES = 1024**2


class ShardWriter:
    """Writes the splits of one prepared folder."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        shown: Path | None = None,
        has_loss_mask: bool = False,
    ) -> None:
        """Start with an empty folder.

        Args:
            folder: An existing, empty folder.
            tokenizer: The tokenizer of the tokens; it is saved with them.
            shard_tokens: Maximum tokens per shard, unless one document is longer.
            shown: The folder to name in errors, if ``folder`` is temporary.
            has_loss_mask: Whether documents have a loss mask.
        """
        self.prompt_tokens = 0
        """Tokens of prompts so far."""
        self._folder = folder
        self._shown = shown or folder
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer)
        self._splits = {name: _SplitWriter(folder, name, shard_tokens, has_loss_mask) for name in SPLITS}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for split in self._splits.values():
            split.abandon()

    def add(
        self,
        split: str,
        tokens: npt.NDArray[Any],
        loss_mask: npt.NDArray[np.uint8] | None = None,
        ends: bool = True,
    ) -> None:
        """Append one document and its end token, which has the loss mask of the last token.

        A long document comes in pieces; ``ends`` is false for all but the last one.
        """
        document = np.empty(len(tokens) + ends, dtype=self._dtype)
        document[: len(tokens)] = tokens
        if ends:
            document[-1] = self._tokenizer.end_of_document
            loss_mask = None if loss_mask is None else np.append(loss_mask, loss_mask[-1:])
        with storage_errors(self._shown):
            self._splits[split].add(document, loss_mask, ends)
        if loss_mask is not None:
            self.prompt_tokens += len(document) - int(loss_mask.sum())

    def finish(self) -> ShardIndex:
        """Close the last shards, sync all files to disk, and write the index."""
        with storage_errors(self._shown):
            train, held_out = (self._splits[name].finish() for name in SPLITS)
            return write_index(self._folder, self._tokenizer, train, held_out)


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The dtype of the token files."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def write_index(
    folder: Path, tokenizer: Tokenizer, train: tuple[ShardEntry, ...], held_out: tuple[ShardEntry, ...]
) -> ShardIndex:
    """Write the tokenizer and the index of a folder with shards, and sync them to disk."""
    index = ShardIndex(
        version=SHARDS_VERSION,
        dtype="uint16" if token_dtype(tokenizer).itemsize == 2 else "uint32",
        tokenizer=TokenizerEntry(
            name=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            end_of_document=tokenizer.end_of_document,
            sha256=tokenizer.fingerprint(),
        ),
        splits=SplitEntries(train=SplitEntry(train), eval=SplitEntry(held_out)),
    )
    tokenizer.save(folder)
    sync_path(folder / TOKENIZER_FILE)
    (folder / PREPARED_INDEX).write_bytes(index.to_bytes())
    sync_path(folder / PREPARED_INDEX)
    return index


class _SplitWriter:
    """Writes the shards of one split, one at a time."""

    def __init__(self, folder: Path, name: str, shard_tokens: int, has_loss_mask: bool) -> None:
        self._folder = folder
        self._name = name
        self._shard_tokens = shard_tokens
        self._has_loss_mask = has_loss_mask
        self._done: list[ShardEntry] = []
        self._file: _HashedFile | None = None
        self._loss_mask: _HashedFile | None = None
        self._tokens = 0
        self._starts = array("Q")
        self._inside = False
        """Whether the last piece was not the end of its document."""

    def add(self, document: npt.NDArray[Any], loss_mask: npt.NDArray[np.uint8] | None, ends: bool) -> None:
        assert (loss_mask is not None) == self._has_loss_mask, (
            "all documents of a folder have a loss mask, or none"
        )
        fits = self._inside or self._tokens + len(document) <= self._shard_tokens
        if self._file is not None and not fits:
            self._close_shard()
        if self._file is None:
            self._file = _HashedFile(self._folder / f"{self._stem}.bin")
            self._loss_mask = (
                _HashedFile(self._folder / f"{self._stem}.loss_mask.u8") if self._has_loss_mask else None
            )
            self._tokens, self._starts = 0, array("Q")
        if not self._inside:
            self._starts.append(self._tokens)
        self._inside = not ends
        self._tokens += len(document)
        self._file.write(document.tobytes())
        if self._loss_mask is not None and loss_mask is not None:
            self._loss_mask.write(loss_mask.astype(np.uint8).tobytes())

    def finish(self) -> tuple[ShardEntry, ...]:
        self._close_shard()
        return tuple(self._done)

    def abandon(self) -> None:
        for file in (self._file, self._loss_mask):
            if file is not None:
                with suppress(OSError):  # closing flushes, and the disk may be full
                    file.close()
        self._file = self._loss_mask = None

    @property
    def _stem(self) -> str:
        return f"{self._name}-{len(self._done):05d}"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        for file in (self._file, self._loss_mask):
            if file is not None:
                file.close()
                sync_path(file.path)
        starts = np.asarray(self._starts, dtype="<u8").tobytes()
        documents_file = self._folder / f"{self._stem}.docs.u64"
        documents_file.write_bytes(starts)
        sync_path(documents_file)
        entry = ShardEntry(
            file=self._file.path.name,
            tokens=self._tokens,
            sha256=self._file.sha256,
            documents_file=documents_file.name,
            documents=len(self._starts),
            documents_sha256=hashlib.sha256(starts).hexdigest(),
            loss_mask_file=self._loss_mask.path.name if self._loss_mask else None,
            loss_mask_sha256=self._loss_mask.sha256 if self._loss_mask else None,
        )
        self._file = self._loss_mask = None
        self._done.append(entry)


class _HashedFile:
    """A new file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = hashlib.sha256()
        self._file = path.open("xb", buffering=_BUFFER_BYTES)

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()
