"""Files: whether they can be written, are there after a crash, and how much room they take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flush a closed file, or the entries of a folder, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: a reader sees the old one or the new one, and never half of it.

    Args:
        path: In a folder that is there.
        text: All of it.
    """
    # Other processes may write the same file, and those of other machines, where a folder is shared.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def can_write(path: Path) -> bool:
    """Whether a file can be made at a path, or written over; to be known before anything is measured."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  (thousands of files)
            except OSError:
                continue
    return total
