"""A plain checkpoint: one rank writes the whole state into a fresh folder.

The folder is filled under another name, flushed and renamed, so it is whole or it is not there. What is in
it, ``manifest`` says.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.core.files import sync_path
from meshwright.survive.checkpoint.manifest import (
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    FileFacts,
    Manifest,
    checkpoint_name,
    file_sha256,
)


def save_checkpoint(
    root: Path,
    manifest: Manifest,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    extra_files: tuple[Path, ...] = (),
) -> Path:
    """Write one checkpoint; on any failure the draft is removed and the error passed on."""
    final = root / checkpoint_name(manifest.step)
    draft = root / f".{final.name}.{os.getpid()}.part"
    try:
        draft.mkdir(parents=True)
        save_file(dict(model), draft / MODEL_FILE)
        save_file(dict(optimizer), draft / OPTIMIZER_FILE)
        for extra in extra_files:
            shutil.copyfile(extra, draft / extra.name)
        files = {p.name: FileFacts(p.stat().st_size, file_sha256(p)) for p in sorted(draft.iterdir())}
        content = asdict(replace(manifest, files=files))
        (draft / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")
        for written in draft.iterdir():
            written.chmod(0o644)  # safetensors makes files that only their owner can read
            sync_path(written)
        sync_path(draft)
        aside = root / f".{final.name}.old"
        if final.exists():  # a resumed run reached a step that it had saved before
            final.rename(aside)
        draft.rename(final)
        sync_path(root)
        shutil.rmtree(aside, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, SafetensorError):  # its way to say that the disk is full
            raise OSError(str(error)) from error
        raise
    return final


def load_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU."""
    return load_file(checkpoint / name)


def open_tensors(checkpoint: Path, name: str) -> Any:
    """One file as a context that hands out a tensor at a time."""
    return safe_open(checkpoint / name, framework="pt")
