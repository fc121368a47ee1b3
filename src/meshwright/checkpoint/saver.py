"""A plain checkpoint: one rank writes the whole state into a fresh folder, tensor by tensor.

The folder is filled under another name, flushed and renamed, so it is whole or it is not there. What is in
it, ``manifest`` says. A header needs names, types and shapes alone, so that the writer holds one tensor
at a time, however large the state is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileFacts,
    Manifest,
    checkpoint_name,
    file_sha256,
)
from meshwright.core.files import sync_path
from meshwright.core.tensor_header import TensorInfo, build_tensor_header

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: Callable[[], Tensor]
    """Makes it; where it is cut, together with the other ranks."""

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """A tensor that is there already."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def facts(self) -> TensorInfo:
        """As the file's header has it."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return TensorInfo(_DTYPES[self.dtype], self.shape, size)


class Snapshot:
    """What a checkpoint holds: names and shapes at once, the values one tensor at a time, each once.

    All ranks that share the state go through the same tensors in the same order.
    """

    def __init__(self, files: Mapping[str, Mapping[str, SavedTensor]]) -> None:
        """Nothing is made yet.

        Args:
            files: The tensors of each file, by name.
        """
        # Wide elements first, then by name: every element is aligned, and the bytes are safetensors' own.
        self._files = {
            file: dict(sorted(pieces.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
            for file, pieces in files.items()
        }
        self._tensors = (piece.whole() for pieces in self._files.values() for piece in pieces.values())

    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        """What each file will hold, in order."""
        return {
            file: {name: piece.facts for name, piece in pieces.items()}
            for file, pieces in self._files.items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of all files, from the first that was not taken yet."""
        return self._tensors

    def drain(self) -> None:
        """Take part in what is left and keep nothing: the others wait for this rank in every gather."""
        deque(self._tensors, maxlen=0)


def save_checkpoint(
    root: Path, manifest: Manifest, snapshot: Snapshot, extra_files: tuple[Path, ...] = ()
) -> Path:
    """Write one checkpoint; on any failure the draft is removed and the error passed on."""
    final = root / checkpoint_name(manifest.step)
    draft = root / f".{final.name}.{os.getpid()}.part"
    try:
        draft.mkdir(parents=True)
        files = {
            name: _write_tensors(draft / name, header, snapshot.tensors())
            for name, header in snapshot.headers().items()
        }
        for extra in extra_files:
            copy = Path(shutil.copyfile(extra, draft / extra.name))
            files[extra.name] = FileFacts(copy.stat().st_size, file_sha256(copy))
        content = asdict(replace(manifest, files=files))
        (draft / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")
        for written in draft.iterdir():
            sync_path(written)
        sync_path(draft)
        aside = root / f".{final.name}.old"
        if final.exists():  # a resumed run reached a step that it had saved before
            final.rename(aside)
        draft.rename(final)
        sync_path(root)
        shutil.rmtree(aside, ignore_errors=True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def _write_tensors(path: Path, header: Mapping[str, TensorInfo], tensors: Iterator[Tensor]) -> FileFacts:
    """One file, its checksum taken on the way: it is not read again."""
    first = build_tensor_header(header)
    digest = hashlib.sha256(first)
    with path.open("xb") as file:
        file.write(first)
        for name, facts in header.items():
            tensor = next(tensors).detach()
            there = (_DTYPES.get(tensor.dtype), tuple(tensor.shape))
            assert there == (facts.dtype, facts.shape), f"{name} is {there}, its header says {facts}"
            values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(values)
            file.write(values)
            del tensor, values  # before the next one is made
    return FileFacts(len(first) + sum(facts.bytes for facts in header.values()), digest.hexdigest())


def open_tensors(checkpoint: Path, name: str) -> Any:
    """One file as a context that hands out a tensor at a time."""
    return safe_open(checkpoint / name, framework="pt")
