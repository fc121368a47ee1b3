"""Writes the tensor files of a checkpoint, and reads any slice of any full tensor from them.

Each is a safetensors file. An entry is a full tensor under its name, or a chunk of it under the name and
the index of its first element: ``embed.weight@1024,0``. To read a slice, the reader reads the chunks that
overlap with it. So a checkpoint loads into any layout. Headers are read when they are needed, beginning with
a preferred file: a rank that resumes in the same layout opens its own file only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from meshwright.checkpoint.manifest import FileFacts, Manifest, TensorFacts, broken_checkpoint, read_manifest
from meshwright.core.errors import UserError
from meshwright.core.object_path import AnyPath, open_new, read_range
from meshwright.core.tensor_header import TensorInfo, build_tensor_header, read_tensor_header
from meshwright.layout.parameters import list_parameters
from meshwright.layout.state_chunks import TensorSlice
from meshwright.spec.model import Model, TaggedModel

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
"""Names of dtypes in safetensors files."""
_MODEL: TypeAdapter[Model] = TypeAdapter(TaggedModel)
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
WRITE_BYTES = 2**24
"""Written, and read for the checksum, at a time."""


class WriteItem(NamedTuple):
    """A slice of a full tensor, to be written."""

    name: str
    tensor_slice: TensorSlice
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    values: Tensor

    @property
    def key(self) -> str:
        """Its name in the file."""
        return chunk_key(self.name, self.tensor_slice, self.shape)

    @property
    def info(self) -> TensorInfo:
        """Its entry in the header."""
        size = self.tensor_slice.count * self.values.dtype.itemsize
        return TensorInfo(DTYPES[self.values.dtype], self.tensor_slice.shape, size)


class _StoredChunk(NamedTuple):
    path: AnyPath
    tensor_slice: TensorSlice
    info: TensorInfo


def chunk_key(name: str, tensor_slice: TensorSlice, shape: tuple[int, ...]) -> str:
    """The name of a chunk in a file."""
    return name if tensor_slice.shape == shape else f"{name}@{','.join(map(str, tensor_slice.start))}"


def parse_key(key: str, shape: tuple[int, ...]) -> tuple[str, TensorSlice]:
    """The full tensor of a chunk, and the slice of it that the chunk is.

    Raises:
        ValueError: The key does not fit the shape.
    """
    name, _, offsets = key.partition("@")
    start = tuple(int(part) for part in offsets.split(",")) if offsets else (0,) * len(shape)
    if len(start) != len(shape) or min(start, default=0) < 0:
        raise ValueError(f"{key} has {len(shape)} dims")
    return name, TensorSlice(start, shape)


def write_tensors(
    path: AnyPath, items: Sequence[WriteItem], check: Callable[[WriteItem, Tensor], None]
) -> FileFacts:
    """Write a file of chunks, flush it, and compute its checksum on the way.

    Args:
        path: A new file.
        items: Its tensors.
        check: Called with each item and its values in CPU memory; raises to refuse it.
    """
    # Wide elements first, then by name: every element is aligned, and the bytes are safetensors' own.
    ordered = sorted(items, key=lambda item: (-item.values.dtype.itemsize, item.key))
    header = build_tensor_header({item.key: item.info for item in ordered})
    digest, size = hashlib.sha256(header), len(header)
    with open_new(path, len(header) + sum(item.info.bytes for item in ordered)) as file:
        file.write(header)
        for item in ordered:
            values = item.values.detach().cpu().contiguous()
            assert values.numel() == item.tensor_slice.count, f"{item.key} has {values.numel()} elements"
            check(item, values)
            data = values.reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), WRITE_BYTES):
                digest.update(data[start : start + WRITE_BYTES])
                file.write(data[start : start + WRITE_BYTES])
            size += len(data)
    return FileFacts(size, digest.hexdigest())


class CheckpointReader:
    """Reads full tensors of a checkpoint, and slices of them."""

    def __init__(self, checkpoint: AnyPath, manifest: Manifest | None = None, prefer: int = 0) -> None:
        """Open nothing yet.

        Args:
            checkpoint: A verified folder.
            manifest: Manifest of it, if it was read already.
            prefer: Of its files of tensors, the one to look into first.
        """
        self.checkpoint = checkpoint
        manifest = manifest or read_manifest(checkpoint, verify=False)
        self._model = manifest.model
        files = manifest.tensor_files
        first = prefer % len(files) if files else 0
        self._unread: list[AnyPath] = [checkpoint / name for name in (*files[first:], *files[:first])][::-1]
        self._chunks: dict[str, list[_StoredChunk]] = {}
        self._facts = dict(manifest.tensors)
        self._has_facts = manifest.version > 1
        if not self._has_facts:  # all tensors are full
            while self._unread:
                self._facts |= self._read_header()

    @property
    def location(self) -> str:
        """The folder, for errors."""
        return str(self.checkpoint)

    def names(self) -> list[str]:
        """The names of all full tensors."""
        return list(self._facts)

    def facts(self, name: str) -> TensorFacts:
        """Dtype and shape of a full tensor.

        Raises:
            UserError: There is none of this name.
        """
        if name not in self._facts:
            raise self._broken(f"lacks the tensor {name}")
        return self._facts[name]

    def read_model(self) -> Model:
        """The model of the manifest, whose parameters are among the tensors.

        Raises:
            UserError: It is not a model, or one with other parameters: nothing of its size is allocated.
        """
        blocks, depth = self._model.get("blocks"), self._model.get("num_layers")
        counts = [n for n in (*(blocks if isinstance(blocks, list) else ()), depth) if isinstance(n, int)]
        if sum(counts) > len(self._facts):
            raise self._broken("has fewer tensors than its model has layers")
        try:
            model = _MODEL.validate_python(self._model)
            wrong = [p for p in list_parameters(model) if self.facts(p.name).shape != p.shape]
        except (ValueError, ArithmeticError) as error:
            reason = str(error).splitlines()[0]
            raise self._broken(f"has a manifest without a usable model: {reason}") from None
        if wrong:
            saved = self.facts(wrong[0].name).shape
            raise self._broken(f"has {wrong[0].name} with the shape {saved}; its model has {wrong[0].shape}")
        return model

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Read a full tensor, or a slice of it, into new memory.

        Args:
            name: Name of the tensor.
            tensor_slice: None for all of it.

        Raises:
            UserError: Its shape is another one, some of it is missing, or it cannot be read.
        """
        facts = self.facts(name)
        tensor_slice = tensor_slice or TensorSlice.full(facts.shape)
        if not tensor_slice.fits(facts.shape):
            needed = f"{tensor_slice.shape} at {tensor_slice.start} is needed"
            raise self._broken(f"has {name} with the shape {facts.shape}; {needed}")
        if facts.dtype not in _TORCH_DTYPES:
            raise self._broken(f"has a tensor of dtype {facts.dtype}")
        values = torch.empty(tensor_slice.shape, dtype=_TORCH_DTYPES[facts.dtype])
        missing, filled = tensor_slice.count, list[TensorSlice]()
        for chunk in self._find_chunks(name):
            common = tensor_slice.intersect(chunk.tensor_slice)
            if common is not None:
                if any(common.intersect(other) for other in filled):
                    raise self._broken(f"has elements of {name} twice, in {chunk.path.name}")
                filled.append(common)
                values[common.relative_to(tensor_slice).index] = self._read_slice(
                    chunk, common.relative_to(chunk.tensor_slice)
                )
                missing -= common.count
            if missing == 0:
                return values
        if missing:
            raise self._broken(
                f"lacks {missing} of the {tensor_slice.count} elements of {name} that are needed"
            )
        return values

    def _find_chunks(self, name: str) -> Iterator[_StoredChunk]:
        """The chunks of a tensor, from the headers that are read; then from the others."""
        yield from self._chunks.get(name, ())
        while self._unread:
            listed = len(self._chunks.get(name, ()))
            self._read_header()
            yield from self._chunks.get(name, [])[listed:]

    def _read_header(self) -> dict[str, TensorFacts]:
        """Read the header of the next file; returns its full tensors."""
        path = self._unread.pop()
        full: dict[str, TensorFacts] = {}
        try:
            for key, info in read_tensor_header(path).items():
                name, tensor_slice = parse_key(key, info.shape)
                self._require_fit(key, info, tensor_slice, self._facts.get(name))
                self._chunks.setdefault(name, []).append(_StoredChunk(path, tensor_slice, info))
                full[name] = TensorFacts(info.dtype, info.shape)
        except (OSError, ValueError) as error:
            raise self._broken(f"has a file that cannot be read: {path.name}: {error}") from None
        return full

    def _require_fit(
        self, key: str, info: TensorInfo, tensor_slice: TensorSlice, facts: TensorFacts | None
    ) -> None:
        """Check an entry of a file against the manifest.

        Raises:
            ValueError: The tensor has another dtype or shape there, or is not in it.
        """
        if not self._has_facts:
            return
        if facts is None or info.dtype != facts.dtype or not tensor_slice.fits(facts.shape):
            raise ValueError(f"{key} ({info.dtype}, {info.shape}) is not a part of a tensor of the manifest")

    def _read_slice(self, chunk: _StoredChunk, tensor_slice: TensorSlice) -> Tensor:
        """Read a slice of a chunk: its rows as one range of the file, then the columns."""
        shape, dtype = chunk.info.shape, _TORCH_DTYPES.get(chunk.info.dtype)
        if dtype is None:
            raise self._broken(f"has a tensor of dtype {chunk.info.dtype}")
        if not shape:
            start, count = 0, 1
        else:
            row = math.prod(shape[1:])
            start, count = tensor_slice.start[0] * row, tensor_slice.shape[0] * row
        try:
            data = read_range(chunk.path, chunk.info.offset + start * dtype.itemsize, count * dtype.itemsize)
        except OSError as error:
            raise self._broken(f"has a file that cannot be read: {chunk.path.name}: {error}") from None
        if len(data) != count * dtype.itemsize:
            raise self._broken(f"has a truncated file: {chunk.path.name}")
        values = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        if not shape:
            return values.reshape(())
        return values.view(tensor_slice.shape[0], *shape[1:])[(slice(None), *tensor_slice.index[1:])]

    def _broken(self, rule: str) -> UserError:
        return broken_checkpoint(self.checkpoint, rule)
