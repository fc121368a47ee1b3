"""The small files of the Hugging Face folder that a run started from; every checkpoint keeps them.

So an export writes the same kind of folder, also when the first one is gone.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from meshwright.checkpoint.hf.names import is_buffer
from meshwright.checkpoint.hf.weights import find_weights
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import folder_bytes
from meshwright.core.tensor_header import read_tensor_header
from meshwright.spec.model import DecoderModel

SOURCE_FILE = "hf_source.zip"
"""Its name in a checkpoint."""
PATTERNS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
)
"""Configs, tokenizers, chat templates and licenses."""
MAX_FILE_BYTES = 64 * 2**20
_BAD_ARCHIVE = (
    OSError,
    ValueError,
    LookupError,
    AttributeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Raised for archives that are not ours; a RuntimeError for one with a password, or deeply nested JSON."""
_TENSORS = ".tensors.json"
"""Entry of the archive with the table of tensors; no pattern matches it."""


@dataclass(frozen=True)
class HfSource:
    """A Hugging Face folder without its weights."""

    files: dict[str, bytes]
    """By path relative to the folder."""
    tensors: dict[str, str]
    """Names and safetensors dtypes of the weights as stored; empty for a folder with only a config."""

    def to_zip(self) -> bytes:
        """The archive that a checkpoint keeps; equal sources give equal bytes."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in {**self.files, _TENSORS: json.dumps(self.tensors).encode()}.items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


def read_hf_folder(model: DecoderModel) -> HfSource:
    """Read the folder of a model."""
    assert model.hf is not None, "called for models with a folder"
    folder = Path(model.hf)
    paths = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if path.is_file()
        and path.stat().st_size <= MAX_FILE_BYTES
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    }
    weights = find_weights(folder, model)
    tensors = {
        name: facts.dtype
        for file in (weights.files if weights else ())
        for name, facts in read_tensor_header(file).items()
        if not is_buffer(name)
    }
    return HfSource(files, tensors)


def load_source(checkpoint: Path) -> HfSource | None:
    """Read the source that a verified checkpoint keeps; None if its run started without a folder."""
    path = checkpoint / SOURCE_FILE
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            _check_entries(archive.infolist(), folder_bytes(checkpoint))
            files = {name: archive.read(name) for name in archive.namelist()}
        tensors: dict[str, str] = json.loads(files.pop(_TENSORS))
        if not all(isinstance(dtype, str) for dtype in tensors.values()):
            raise ValueError("the table of its tensors is not one")
    except _BAD_ARCHIVE as error:
        rule = f"cannot be used: {error}"
        raise UserError(
            Problem("checkpoint-broken", rule, path=str(path), fix="Use another checkpoint")
        ) from None
    return HfSource(files, tensors)


def _check_entries(entries: list[zipfile.ZipInfo], checkpoint_bytes: int) -> None:
    """Refuse files that :func:`read_hf_folder` does not keep: export would write them outside its folder.

    Raises:
        ValueError: An entry is not one of the kept kinds, or all of them are too large to be unpacked.
    """
    for entry in entries:
        name = PurePosixPath(entry.filename)
        inside = not name.is_absolute() and ".." not in name.parts
        known = entry.filename == _TENSORS or any(name.match(pattern) for pattern in PATTERNS)
        if not (inside and known and entry.file_size <= MAX_FILE_BYTES):
            raise ValueError(f"it has a file that no checkpoint keeps: {entry.filename}")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{entry.filename} has another compression than checkpoints use")
    if sum(entry.file_size for entry in entries) > max(MAX_FILE_BYTES, checkpoint_bytes):
        raise ValueError("its files are larger than the checkpoint")
