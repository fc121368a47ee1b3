"""The small files of the Hugging Face folder that a run started from; every checkpoint keeps them.

So an export writes the same kind of folder, also when the first one is gone.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.hf.names import is_buffer
from meshwright.checkpoint.hf.weights import find_weights
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
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    return HfSource(tensors=json.loads(files.pop(_TENSORS)), files=files)
