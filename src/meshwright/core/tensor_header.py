"""Reads and writes the header of a safetensors file: names, dtypes and shapes.

The format: eight bytes with the header's length (little-endian), the header as JSON, then the tensor data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.core.object_path import AnyPath

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
ELEMENT_BYTES |= {"U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    dtype: str
    """Name in the format: F32, BF16, ..."""
    shape: tuple[int, ...]
    bytes: int
    offset: int = field(default=0, compare=False)
    """Where its data begin in a file that was read."""


def build_tensor_header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The header of a file with the tensors in this order."""
    header: dict[str, Any] = {}
    end = 0
    for name, facts in tensors.items():
        begin, end = end, end + facts.bytes
        header[name] = {"dtype": facts.dtype, "shape": facts.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # aligns the tensor data
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_tensor_header(path: AnyPath) -> dict[str, TensorInfo]:
    """The tensors of a file, by name.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a safetensors file, or is truncated; with the reason.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > MAX_HEADER_BYTES:
            raise ValueError("it is not a safetensors file")
        if LENGTH_BYTES + length > size:
            raise ValueError(f"it is truncated: {size} bytes, and its header has {length}")
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = {name: _facts(entry) for name, entry in header.items() if name != "__metadata__"}
        ends = [int(header[name]["data_offsets"][1]) for name in tensors]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is not a safetensors file: its header cannot be read") from None
    if sum(facts.bytes for facts in tensors.values()) > max(ends, default=0):
        raise ValueError("it is not a safetensors file: its tensors overlap")
    expected = LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        how = "is truncated" if size < expected else "is too long"
        raise ValueError(f"it {how}: {size} bytes, and its header says {expected}")
    data = LENGTH_BYTES + length
    return {name: replace(facts, offset=data + facts.offset) for name, facts in tensors.items()}


def _facts(entry: dict[str, Any]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (begin, end, *entry["shape"])):
        raise ValueError("offsets and shape are not numbers of bytes and elements")
    facts = TensorInfo(str(entry["dtype"]), tuple(entry["shape"]), end - begin, begin)
    known = ELEMENT_BYTES.get(facts.dtype)
    if facts.bytes < 0 or (known and known * math.prod(facts.shape) != facts.bytes):
        raise ValueError("offsets and shape do not agree")
    return facts
